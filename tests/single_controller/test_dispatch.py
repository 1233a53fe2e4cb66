from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import DispatchError
from hybridrl.single_controller import Dispatch, RankLayout, Whole
from hybridrl.single_controller.dispatch import pad_arguments
from hybridrl.single_controller.payload import num_rows


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Any number of dp ranks, each with some peers of which any one answers, in any order."""
    dp_size = draw(st.integers(1, 5))
    places: list[tuple[int, bool]] = []
    for dp_rank in range(dp_size):
        num_peers = draw(st.integers(1, 3))
        answers = draw(st.integers(0, num_peers - 1))
        places += [(dp_rank, peer == answers) for peer in range(num_peers)]
    places = draw(st.permutations(places))
    return RankLayout(tuple(dp for dp, _ in places), tuple(collects for _, collects in places))


@given(layouts(), st.integers(0, 4))
def test_collecting_what_was_split_gives_the_batch_back(layout: RankLayout, share: int) -> None:
    rows = np.arange(share * layout.dp_size * 2).reshape(-1, 2)
    slices = Dispatch.DP_COMPUTE.split(layout, rows)
    assert [len(part) for part in slices] == [share] * layout.world_size
    answers = [
        part if collects else None for part, collects in zip(slices, layout.collects, strict=True)
    ]
    np.testing.assert_array_equal(Dispatch.DP_COMPUTE.collect(layout, answers), rows)


@given(layouts(), st.integers(1, 17), st.integers(1, 3))
def test_padding_leaves_no_trace_in_the_result(
    layout: RankLayout, rows: int, answers_per_row: int
) -> None:
    batch, tags = np.arange(rows), [str(row) for row in range(rows)]
    padded, padding = pad_arguments([batch, tags, 0.5], layout.dp_size)
    assert (padding is None) == (rows % layout.dp_size == 0)
    assert num_rows(padded[0]) == num_rows(padded[1]) == -(-rows // layout.dp_size) * layout.dp_size
    slices = Dispatch.DP_COMPUTE.split(layout, padded[0])
    results = [np.repeat(part, answers_per_row) for part in slices]
    if padding is not None:
        results = padding.strip(layout, results)
    joined = Dispatch.DP_COMPUTE.collect(layout, results)
    np.testing.assert_array_equal(joined, np.repeat(batch, answers_per_row))


def test_one_slice_is_the_batch_itself() -> None:
    rows = np.arange(6).reshape(3, 2)
    parts = Dispatch.DP_COMPUTE.split(RankLayout((0, 0), (True, False)), rows)
    assert [part is rows for part in parts] == [True, True]


@given(layouts())
def test_peers_share_one_slice_object_so_that_it_is_sent_once(layout: RankLayout) -> None:
    slices = Dispatch.DP_COMPUTE.split(layout, np.arange(layout.dp_size))
    assert len({id(part) for part in slices}) == layout.dp_size


def test_an_indivisible_batch_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(DispatchError, match=r"250 rows evenly over 8 .*: 248 and 256 rows.*pad=Tr"):
        Dispatch.DP_COMPUTE.split(RankLayout.flat(8), list(range(250)))


def test_a_batch_smaller_than_the_ranks_names_the_size_above() -> None:
    with pytest.raises(DispatchError, match=r"nearest that works: 4 rows"):
        Dispatch.DP_COMPUTE.split(RankLayout.flat(4), [1, 2, 3])


def test_what_is_no_payload_or_marked_whole_reaches_every_rank() -> None:
    layout = RankLayout.flat(2)
    assert Dispatch.DP_COMPUTE.split(layout, 0.5) == [0.5, 0.5]
    assert (
        Dispatch.DP_COMPUTE.split(layout, Whole(["stop", "end", "x"])) == [["stop", "end", "x"]] * 2
    )


@pytest.mark.parametrize("values", [[1, 2, 3], {"a": 1, "b": 2}, 5])
def test_all_to_all_refuses_what_has_not_one_entry_per_rank(values: object) -> None:
    with pytest.raises(DispatchError, match="one entry per rank"):
        Dispatch.ALL_TO_ALL.split(RankLayout.flat(2), values)


@pytest.mark.parametrize(
    ("dp_rank_of", "collects"),
    [
        ((0, 2), (True, True)),
        ((0, 0), (True, True)),
        ((0, 0), (False, False)),
        ((0, 1), (True, False)),
    ],
)
def test_a_layout_in_which_a_slice_has_not_one_answer_is_refused(
    dp_rank_of: tuple[int, ...], collects: tuple[bool, ...]
) -> None:
    with pytest.raises(DispatchError, match="exactly one rank each"):
        RankLayout(dp_rank_of, collects)


def test_metrics_are_listed_by_dp_rank_of_the_ranks_that_answer() -> None:
    layout = RankLayout((1, 1, 0, 0), (False, True, True, False))
    results = ["r0", {"loss": 1.0}, {"loss": 0.0}, "r3"]
    assert Dispatch.DP_COMPUTE.collect(layout, results) == [{"loss": 0.0}, {"loss": 1.0}]
    assert Dispatch.DP_COMPUTE_METRIC.collect(layout, results) == [{"loss": 0.0}, {"loss": 1.0}]


def test_padding_is_not_stripped_from_uneven_result_rows() -> None:
    _, padding = pad_arguments([[1, 2, 3]], 2)
    assert padding is not None
    with pytest.raises(DispatchError, match="3 result rows for 2 padded rows"):
        padding.strip(RankLayout.flat(2), [[1, 2, 3], [1, 2, 3]])


def test_arguments_of_different_length_are_not_padded_together() -> None:
    with pytest.raises(DispatchError, match=r"\[3, 4\] rows together"):
        pad_arguments([[1, 2, 3], [1, 2, 3, 4]], 2)
