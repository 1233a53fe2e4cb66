"""What runs are judged by, out of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hybridrl.report.history import parse_row, read_lines
from hybridrl.run.run_folder import METRICS

SCORES: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    ("eval/reward/mean", max),
    ("reward/mean", max),
    ("eval/loss_nats", min),
    ("loss/supervised_nats", min),
)
"""Metrics that runs are compared by, the first that a run has; and which value is the best."""


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the whole lines of ``metrics.jsonl``, without values that are not finite.

    A run that was killed may leave half a line, without its newline.
    """
    with suppress(OSError):
        lines = (line for line in read_lines(run_folder / METRICS) if line.endswith(b"\n"))
        rows = [row for line in lines if (row := parse_row(line)) is not None]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    return []
