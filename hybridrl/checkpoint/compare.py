"""Whether two run folders hold the same run, bit by bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.manifest import FileEntry
from hybridrl.checkpoint.store import Checkpoint, CheckpointStore
from hybridrl.errors import CheckpointError
from hybridrl.json_text import to_json_text

_TIMED = ("time/", "throughput/", "memory/")
"""Metrics that measure the machine and not the run."""

_NOT_LEARNT = "elapsed_s"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was compared."""

    what: str
    """For example ``weights``."""

    amount: str
    """How much of it, in words."""

    differences: tuple[str, ...]
    """In words; empty if every bit is the same."""


def compare_runs(first: Path, second: Path) -> list[Difference]:
    """Compare metrics, samples, and the newest checkpoints' weights, optimizer and place.

    Args:
        first: a run folder.
        second: another.

    Raises:
        CheckpointError: one of them has no whole checkpoint.
    """
    return [
        _compare_metrics(first, second),
        _compare_samples(first, second),
        *_compare_checkpoints(first, second),
    ]


def _compare_metrics(first: Path, second: Path) -> Difference:
    ours, theirs = _read_metrics(first), _read_metrics(second)
    differences = [
        f"step {step}: {name} is {ours.get((step, name))} and {theirs.get((step, name))}"
        for step, name in sorted(ours.keys() | theirs.keys())
        if ours.get((step, name)) != theirs.get((step, name))
    ]
    num_steps = len({step for step, _ in ours})
    amount = f"{len(ours):,} values of {num_steps} lines (without {', '.join(_TIMED)})"
    return Difference("metrics", amount, tuple(differences))


def _read_metrics(folder: Path) -> dict[tuple[int, str], float | None]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        (record["step"], name): value
        for record in map(json.loads, lines)
        for name, value in record.items()
        if name != _NOT_LEARNT and not name.startswith(_TIMED)
    }


def _compare_samples(first: Path, second: Path) -> Difference:
    ours, theirs = ((f / "samples.jsonl").read_bytes().splitlines() for f in (first, second))
    differences = [
        f"line {number}: {mine.decode()} and {other.decode()}"
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False), 1)
        if mine != other
    ]
    if len(ours) != len(theirs):
        differences.append(f"{len(ours)} lines and {len(theirs)}")
    return Difference("samples", f"{len(ours):,} lines", tuple(differences))


def _compare_checkpoints(first: Path, second: Path) -> Iterator[Difference]:
    ours, theirs = (_newest(folder) for folder in (first, second))
    places = [
        f"{key} is {mine} and {other}"
        for key, mine, other in (
            ("step", ours.manifest.run.step, theirs.manifest.run.step),
            ("sampler", ours.manifest.run.sampler, theirs.manifest.run.sampler),
            ("skipped", ours.manifest.run.num_skipped, theirs.manifest.run.num_skipped),
        )
        if mine != other
    ]
    drawn = ours.manifest.run.sampler.num_drawn
    yield Difference("place in the data", f"{drawn:,} rows drawn", tuple(places))
    mine = _digests(ours.folder, ours.manifest.files)
    others = _digests(theirs.folder, theirs.manifest.files)
    for kind in sorted({name.partition(".")[0] for _, name in mine | others}):
        yield _compare_tensors(kind, mine, others)


def _compare_tensors(
    kind: str, ours: Mapping[tuple[str, str], _Digest], theirs: Mapping[tuple[str, str], _Digest]
) -> Difference:
    """Compare the tensors whose name begins with ``kind``, and the notes of each file."""
    names = sorted(key for key in ours.keys() | theirs.keys() if key[1].partition(".")[0] == kind)
    different = [f"{key[0]}: {key[1]}" for key in names if ours.get(key) != theirs.get(key)]
    num_bytes = sum(ours[key].num_bytes for key in names if key in ours)
    title = {"model": "weights", "random": "random generators"}.get(kind, kind)
    return Difference(title, f"{len(names):,} entries, {num_bytes:,} bytes", tuple(different))


@dataclass(frozen=True, slots=True)
class _Digest:
    num_bytes: int
    crc32: int


def _newest(folder: Path) -> Checkpoint:
    found = CheckpointStore(folder / "checkpoints").newest()
    if found is None:
        raise CheckpointError(f"{folder} holds no whole checkpoint to compare")
    return found


def _digests(folder: Path, files: tuple[FileEntry, ...]) -> dict[tuple[str, str], _Digest]:
    """Digest every tensor, and every random generator's state, by file and name."""
    found = {}
    for entry in files:
        data = memoryview((folder / entry.name).read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:begin]))
        metadata = header.pop("__metadata__")
        for name, tensor in header.items():
            low, high = tensor["data_offsets"]
            values = data[begin + low : begin + high]
            found[entry.name, name] = _Digest(len(values), zlib.crc32(values))
        state = to_json_text(json.loads(metadata["notes"])["random"]).encode()
        found[entry.name, "random"] = _Digest(len(state), zlib.crc32(state))
    return found
