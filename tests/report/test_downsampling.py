from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.report.run import Series

values = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(values=values, max_points=st.integers(2, 50))
def test_thinning_keeps_order_size_and_the_extremes(
    values: list[float | None], max_points: int
) -> None:
    series = Series(list(range(len(values))), values)
    thinned = series.downsample(max_points)
    assert len(thinned.steps) <= max_points or thinned is series
    assert thinned.steps == sorted(set(thinned.steps))
    assert all(values[step] == v for step, v in zip(thinned.steps, thinned.values, strict=True))
    if series.finite:
        assert (min(thinned.finite), max(thinned.finite)) == (
            min(series.finite),
            max(series.finite),
        )


@given(values=values)
def test_a_running_mean_keeps_gaps_and_stays_within_the_values(values: list[float | None]) -> None:
    series = Series(list(range(len(values))), values)
    mean = series.running_mean()
    assert mean.steps == series.steps
    assert [value is None for value in mean.values] == [value is None for value in values]
    if series.finite:
        bounds = (min(series.finite) - 1e-6, max(series.finite) + 1e-6)
        assert all(bounds[0] <= value <= bounds[1] for value in mean.finite)


def test_a_running_mean_is_over_the_neighbours_that_there_are() -> None:
    mean = Series([1, 2, 3, 4, 5, 6], [1.0, None, 4.0, 1.0, 10.0, 4.0]).running_mean()
    assert mean.values == [2.5, None, 4.0, 4.75, 4.75, 5.0]
