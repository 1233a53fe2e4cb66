from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.report.history import Series
from hybridrl.report.thinning import average, thin

values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(values=values, max_points=st.integers(2, 50))
def test_thinning_keeps_order_size_and_the_extremes(
    values: list[float | None], max_points: int
) -> None:
    series = Series(list(range(len(values))), values)
    thinned = thin(series, max_points=max_points)
    assert len(thinned.steps) <= max_points or thinned is series
    assert thinned.steps == sorted(set(thinned.steps))
    assert all(values[step] == v for step, v in zip(thinned.steps, thinned.values, strict=True))
    if series.finite:
        assert (min(thinned.finite), max(thinned.finite)) == (
            min(series.finite),
            max(series.finite),
        )


@given(values=values, max_points=st.integers(2, 50))
def test_averages_share_their_steps_and_stay_within_the_values(
    values: list[float | None], max_points: int
) -> None:
    every = Series(list(range(len(values))), values)
    second = Series(every.steps[::2], values[::2])
    first, other = average([every, second], max_points=max_points)
    assert first.steps == other.steps
    assert len(first.steps) <= max_points
    bounds = [v or 0.0 for v in values]
    assert all(min(bounds) - 1e-6 <= v <= max(bounds) + 1e-6 for v in first.finite)


def test_an_average_is_over_neighbours() -> None:
    (column,) = average([Series([1, 2, 3, 4], [1.0, 3.0, 10.0, 20.0])], max_points=2)
    assert column.values == [pytest.approx(2.0), pytest.approx(15.0)]
