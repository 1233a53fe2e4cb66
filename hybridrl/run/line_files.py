"""Files of a run folder that grow by lines: reading them, and detecting lost lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO

from hybridrl.report.history import parse_metrics, read_lines

METRICS = "metrics.jsonl"
"""Name in the run folder."""

SCORES: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    ("eval/reward/mean", max),
    ("reward/mean", max),
    ("eval/accuracy", max),
    ("preference/accuracy", max),
    ("eval/loss_nats", min),
    ("loss/supervised_nats", min),
)
"""Metrics that runs are compared by, the first that a run has; and which value is the best."""

_CHUNK = 1 << 16


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the complete lines of ``metrics.jsonl``, without values that are not finite.

    A run that was killed may leave half a line, without its newline.
    """
    with suppress(OSError):
        lines = (line for line in read_lines(run_folder / METRICS) if line.endswith(b"\n"))
        rows = [row for line in lines if (row := parse_metrics(line)) is not None]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    return []


def last_step(run_folder: Path) -> int:
    """Return the last step in ``metrics.jsonl``; 0 if there is none."""
    rows = read_metrics(run_folder)
    return int(rows[-1]["step"]) if rows else 0


def whole_lines(file: BinaryIO, size: int) -> int:
    """Return the bytes of all complete lines among the first ``size`` bytes of a file."""
    end = min(size, file.seek(0, SEEK_END))
    while end > 0:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def lost_lines(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Name the files of ``folder`` that lack lines which a checkpoint counts on.

    Args:
        sizes: bytes of each file by name at the checkpoint: after complete lines.
    """
    lost = []
    for name, size in sizes.items():
        try:
            with (folder / name).open("rb") as file:
                num_bytes = file.seek(0, SEEK_END)
                is_there = whole_lines(file, size) == size
        except FileNotFoundError:
            num_bytes, is_there = 0, size == 0
        if not is_there:
            lost.append(f"{name} has {num_bytes} bytes, and no line ends after {size}")
    return lost
