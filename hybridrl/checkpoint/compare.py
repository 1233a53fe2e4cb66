"""``python -m hybridrl.checkpoint.compare RUN OTHER_RUN``: metrics, samples, checkpoints, bitwise.

Shows whether a run that was resumed ended as one without a break. Exit status: 0 every bit is the
same, 1 one is not, or a run has nothing to compare.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.store import Checkpoint, CheckpointStore
from hybridrl.errors import CheckpointError
from hybridrl.json_text import to_json_text

_TIMED = ("time/", "throughput/", "memory/")
"""Metrics that measure the machine and not the run."""

_NOT_LEARNT = frozenset(("elapsed_s", "agent/tool_s/mean", "reward/early_fraction"))
"""Others that depend on the clock."""

_NUM_NAMED = 5
_TITLES = {"model": "weights", "random": "random generators", "groups": "finished groups"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was compared."""

    what: str
    """For example ``weights``."""

    amount: str

    differences: tuple[str, ...]
    """In words; empty if every bit is the same."""


def compare_runs(first: Path, second: Path) -> list[Difference]:
    """Compare metrics, samples, and the newest checkpoints: weights, optimizer, data position."""
    return [
        _compare_metrics(first, second),
        _compare_samples(first, second),
        *_compare_checkpoints(first, second),
    ]


def _compare_metrics(first: Path, second: Path) -> Difference:
    first_rows, second_rows = _read_metrics(first), _read_metrics(second)
    differences = [
        f"step {step}: {name} is {first_rows.get((step, name))} and {second_rows.get((step, name))}"
        for step, name in sorted(first_rows.keys() | second_rows.keys())
        if first_rows.get((step, name)) != second_rows.get((step, name))
    ]
    num_steps = len({step for step, _ in first_rows})
    amount = f"{len(first_rows):,} values of {num_steps} lines (without {', '.join(_TIMED)})"
    return Difference("metrics", amount, tuple(differences))


def _read_metrics(folder: Path) -> dict[tuple[int, str], float | None]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        (record["step"], name): value
        for record in map(json.loads, lines)
        for name, value in record.items()
        if name not in _NOT_LEARNT and not name.startswith(_TIMED)
    }


def _compare_samples(first: Path, second: Path) -> Difference:
    first_lines, second_lines = (
        (f / "samples.jsonl").read_bytes().splitlines() for f in (first, second)
    )
    differences = [
        f"line {number}: {first_line.decode()} and {second_line.decode()}"
        for number, (first_line, second_line) in enumerate(
            zip(first_lines, second_lines, strict=False), 1
        )
        if first_line != second_line
    ]
    if len(first_lines) != len(second_lines):
        differences.append(f"{len(first_lines)} lines and {len(second_lines)}")
    return Difference("samples", f"{len(first_lines):,} lines", tuple(differences))


def _compare_checkpoints(first: Path, second: Path) -> Iterator[Difference]:
    checkpoint, other = _newest(first), _newest(second)
    run, other_run = checkpoint.manifest.run, other.manifest.run
    positions = [
        f"{key} is {value} and {other_value}"
        for key, value, other_value in (
            ("step", run.step, other_run.step),
            ("sampler", run.sampler, other_run.sampler),
            ("skipped", run.num_skipped, other_run.num_skipped),
        )
        if value != other_value
    ]
    amount = f"{run.sampler.num_drawn:,} rows drawn"
    yield Difference("position in the data", amount, tuple(positions))
    digests, other_digests = _digests(checkpoint), _digests(other)
    kinds = defaultdict[str, list[tuple[str, str]]](list)
    for key in sorted(digests.keys() | other_digests.keys()):
        kinds[key[1].partition(".")[0]].append(key)
    for kind, keys in sorted(kinds.items()):
        different = [": ".join(key) for key in keys if digests.get(key) != other_digests.get(key)]
        num_bytes = sum(digests[key][0] for key in keys if key in digests)
        amount = f"{len(keys):,} entries, {num_bytes:,} bytes"
        yield Difference(_TITLES.get(kind, kind), amount, tuple(different))


def _newest(folder: Path) -> Checkpoint:
    checkpoint = CheckpointStore(folder / "checkpoints").newest()
    if checkpoint is None:
        raise CheckpointError(f"{folder} contains no complete checkpoint to compare")
    return checkpoint


def _digests(checkpoint: Checkpoint) -> dict[tuple[str, str], tuple[int, int]]:
    """Return bytes and checksum of all tensors and random generators, by file and name."""
    digests = {}
    for entry in checkpoint.manifest.files:
        data = memoryview((checkpoint.folder / entry.name).read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:begin]))
        metadata = header.pop("__metadata__")
        for name, tensor in header.items():
            low, high = tensor["data_offsets"]
            values = data[begin + low : begin + high]
            digests[entry.name, name] = len(values), zlib.crc32(values)
        if "notes" in metadata:  # of a rank; finished groups have none
            state = to_json_text(json.loads(metadata["notes"])["random"]).encode()
            digests[entry.name, "random"] = len(state), zlib.crc32(state)
    return digests


def main(first: Path, second: Path) -> int:
    """Print what was compared and what differs; returns the exit status."""
    try:
        findings = compare_runs(first, second)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    for finding in findings:
        verdict = "DIFFERENT" if finding.differences else "same"
        sys.stdout.write(f"{verdict}: {finding.what}, {finding.amount}\n")
        for text in finding.differences[:_NUM_NAMED]:
            sys.stdout.write(f"  {text}\n")
    return int(any(finding.differences for finding in findings))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m hybridrl.checkpoint.compare RUN OTHER_RUN")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
