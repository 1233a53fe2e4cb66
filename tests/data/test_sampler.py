from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.sampler import RowSampler, SamplerState
from hybridrl.errors import DataError


def sampler(num_rows: int, *, seed: int = 0, shuffle: bool = True) -> RowSampler:
    return RowSampler(num_rows, seed=seed, shuffle=shuffle, fingerprint="f" * 64)


@given(num_rows=st.integers(1, 40), sizes=st.lists(st.integers(1, 50), max_size=8))
def test_every_epoch_holds_every_row_once_whatever_the_batches(
    num_rows: int, sizes: list[int]
) -> None:
    source = sampler(num_rows)
    drawn = [row for size in sizes for row in source.draw(size)]
    assert len(drawn) == source.num_drawn == sum(sizes)
    for start in range(0, len(drawn), num_rows):
        epoch = drawn[start : start + num_rows]
        assert max(Counter(epoch).values()) == 1
    assert drawn == sampler(num_rows).draw(len(drawn))  # the batches do not change the order


@pytest.mark.shows("R2.2")
@given(num_rows=st.integers(1, 20), before=st.integers(0, 60), after=st.integers(0, 60))
def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(
    num_rows: int, before: int, after: int
) -> None:
    source = sampler(num_rows)
    source.draw(before)
    saved = json.dumps(asdict(source.state()))
    resumed = sampler(num_rows)
    resumed.draw(7)
    resumed.restore(SamplerState(**json.loads(saved)))
    assert resumed.draw(after) == source.draw(after)
    assert resumed.state() == source.state()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = sampler(50)
    orders = [source.draw(50), source.draw(50), sampler(50, seed=1).draw(50)]
    assert len({tuple(order) for order in orders}) == 3
    assert sampler(3, shuffle=False).draw(7) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_are_counted_with_their_fraction() -> None:
    source = sampler(4)
    source.draw(6)
    assert source.epoch == 1.5


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows to draw from"):
        sampler(0)


def test_a_state_saved_over_other_rows_is_refused() -> None:
    with pytest.raises(DataError, match="the data has changed: saved over rows aaaaaaaaaaaa"):
        sampler(4).restore(SamplerState(3, "a" * 64))
