"""The metrics of a run as columns, read from a file that may still grow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: where it was logged, and what it was."""

    steps: list[int]
    """Rising."""

    values: list[float | None]
    """None where it was not finite, or too large to square."""

    @property
    def finite(self) -> list[float]:
        """The values that are numbers, in order."""
        return [value for value in self.values if value is not None]

    @property
    def last(self) -> float | None:
        """The last number."""
        return next((value for value in reversed(self.values) if value is not None), None)

    def mean_of_last(self, num_values: int) -> float | None:
        """Return the mean of the last numbers; None if there are fewer."""
        finite = self.finite
        return fmean(finite[-num_values:]) if len(finite) >= num_values else None


_EMPTY = Series([], [])
_LARGEST = 1e150


class History:
    """Every metric of a run by name."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take lines of ``metrics.jsonl``. Of two lines of one step, as a restart leaves them, the
        later counts.
        """
        by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
        self.steps = sorted(by_step)
        self.elapsed_s = [plottable(by_step[step].get("elapsed_s")) for step in self.steps]
        self._series: dict[str, Series] = {}
        for step in self.steps:
            self._add(step, by_step[step])

    @classmethod
    def read(cls, path: Path) -> History:
        """Read ``metrics.jsonl``; a line that is torn, because it is being written, is left out."""
        return cls(read_rows(path))

    @property
    def names(self) -> list[str]:
        """Metrics in the order in which they were first logged."""
        return list(self._series)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def get(self, name: str) -> Series:
        """Return a metric; one without values if it was never logged."""
        return self._series.get(name, _EMPTY)

    def _add(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if "/" not in name:
                continue
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = Series([], [])
            series.steps.append(step)
            series.values.append(plottable(value))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of one a line; what is none is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            row = parse_row(line)
            if row is not None:
                yield row


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a line holds; None if it is torn or none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def plottable(value: object) -> float | None:
    """Return a number that means and squares can be taken of; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # not so if it is not a number
