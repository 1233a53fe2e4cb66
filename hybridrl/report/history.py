"""The metrics of a run as columns, read from a file that may still grow."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

MAX_POINTS = 1000
"""Points of one line in a chart: a browser stays smooth with this many."""

SMOOTHED_SHARE = 0.04
"""Steps of a run over which a running mean is taken, as a fraction."""

_LARGEST = 1e150


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: the steps that logged it, and its values."""

    steps: list[int]
    """Rising."""

    values: list[float | None]
    """None for a value that was not finite, or too large to square."""

    @property
    def finite(self) -> list[float]:
        """The finite values, in order."""
        return [value for value in self.values if value is not None]

    def mean_of_last(self, num_values: int) -> float | None:
        """Return the mean of the last numbers; None if there are fewer."""
        finite = self.finite
        return fmean(finite[-num_values:]) if len(finite) >= num_values else None

    @property
    def is_constant(self) -> bool:
        """Whether it has the same value in each of several steps."""
        return len(self.steps) > 2 and len(set(self.values)) == 1

    @property
    def reach(self) -> int:
        """Steps on either side over which a running mean is taken."""
        return max(2, round(len(self.steps) * SMOOTHED_SHARE / 2))

    def running_mean(self) -> Series:
        """Average each number with its neighbours."""
        sums = list(accumulate((value or 0.0 for value in self.values), initial=0.0))
        counts = list(accumulate((value is not None for value in self.values), initial=0))
        size = len(self.values)
        starts = chain(repeat(0, self.reach), range(size))
        stops = chain(range(self.reach + 1, size + 1), repeat(size))
        means = [
            None if value is None else (sums[stop] - sums[start]) / (counts[stop] - counts[start])
            for value, start, stop in zip(self.values, starts, stops, strict=False)
        ]
        return Series(self.steps, means)

    def downsample(self, max_points: int = MAX_POINTS) -> Series:
        """Keep the lowest and the highest of neighbouring values, so that no spike is lost."""
        if len(self.steps) <= max_points:
            return self
        kept: list[int] = []
        num_buckets = max_points // 2
        for number in range(num_buckets):
            ends = (len(self.steps) * n // num_buckets for n in (number, number + 1))
            bucket = range(*ends)
            finite = [place for place in bucket if self.values[place] is not None]
            ranked = sorted(finite, key=lambda place: self.values[place] or 0.0) or [bucket[0]]
            kept += sorted({ranked[0], ranked[-1]})
        return Series([self.steps[n] for n in kept], [self.values[n] for n in kept])


class History:
    """Every metric of a run by name."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Read lines of ``metrics.jsonl``; of two lines of one step the later counts."""
        by_step = {row["step"]: row for row in rows}
        self.steps = sorted(by_step)
        self.elapsed_s = [plottable(by_step[step].get("elapsed_s")) for step in self.steps]
        self._series: dict[str, Series] = defaultdict(lambda: Series([], []))
        for names, of_names in groupby((by_step[step] for step in self.steps), key=tuple):
            alike = list(of_names)  # most steps log the same metrics: column by column
            steps = [row["step"] for row in alike]
            columns = zip(*(row.values() for row in alike), strict=True)
            for name, values in zip(names, columns, strict=True):
                if "/" in name:
                    self._series[name].steps.extend(steps)
                    self._series[name].values.extend(map(plottable, values))
        self.names = [name for name, series in self._series.items() if series.finite]
        """Metrics with at least one number, in the order in which they were first logged."""

    def get(self, name: str) -> Series:
        """Return a metric; one without values if it was never logged."""
        return self._series.get(name, Series([], []))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; none if it does not exist."""
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is incomplete or not an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl``; None if it is damaged, which its step may be, too."""
    row = parse_row(line)
    step = None if row is None else row.get("step")
    return row if type(step) is int and 0 <= step < 1 << 63 else None


def plottable(value: object) -> float | None:
    """Return a number that can be averaged and squared; None for any other value."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int)):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # false for NaN
