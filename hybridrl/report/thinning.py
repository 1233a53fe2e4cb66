"""Fewer points, same picture: a browser stays smooth with a thousand a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from hybridrl.report.history import Series

MAX_POINTS = 1000


def thin(series: Series, *, max_points: int = MAX_POINTS) -> Series:
    """Keep the lowest and the highest value of each stretch, so that no spike is lost.

    Args:
        series: any number of points.
        max_points: of the result, >= 2; a series that has no more is returned as it is.
    """
    if len(series.steps) <= max_points:
        return series
    kept: list[int] = []
    for stretch in _spans(len(series.steps), max_points // 2):
        finite = [index for index in stretch if series.values[index] is not None]
        if finite:
            ends = {min(finite, key=lambda i: series.values[i] or 0.0)}
            ends.add(max(finite, key=lambda i: series.values[i] or 0.0))
            kept += sorted(ends)
        else:
            kept.append(stretch[0])
    return Series([series.steps[i] for i in kept], [series.values[i] for i in kept])


def average(columns: Sequence[Series], *, max_points: int = MAX_POINTS) -> list[Series]:
    """Average all columns over the same stretches, for areas that lie on one another.

    Args:
        columns: may be logged at different steps; where one is silent it counts as 0.
        max_points: of each result.

    Returns:
        Columns with the same steps.
    """
    steps = sorted({step for column in columns for step in column.steps})
    spans = list(_spans(len(steps), min(max_points, len(steps))))
    middles = [steps[stretch[len(stretch) // 2]] for stretch in spans]
    return [Series(middles, _means(column, steps, spans)) for column in columns]


def _means(column: Series, steps: Sequence[int], spans: Sequence[range]) -> list[float | None]:
    known = dict(zip(column.steps, column.values, strict=True))
    values = [known.get(step) or 0.0 for step in steps]
    return [fmean(values[stretch.start : stretch.stop]) for stretch in spans]


def _spans(num_points: int, num_stretches: int) -> Iterator[range]:
    for number in range(num_stretches):
        yield range(
            number * num_points // num_stretches, (number + 1) * num_points // num_stretches
        )
