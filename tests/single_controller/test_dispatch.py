from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import DispatchError
from hybridrl.single_controller import Dispatch, PayloadOps, RankLayout, Whole, register_payload
from hybridrl.single_controller.dispatch import pad_arguments
from hybridrl.single_controller.payload import concat_rows, is_payload, num_rows, take_rows


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


def strip_uneven() -> None:
    _, padding = pad_arguments([[1, 2, 3]], 2)
    assert padding is not None
    padding.strip(RankLayout.flat(2), [[1, 2, 3], [1, 2, 3]])


def split(value: object, num_ranks: int, *, how: Dispatch = Dispatch.DP_COMPUTE) -> object:
    return how.split(RankLayout.flat(num_ranks), value)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda: split(list(range(250)), 8),
            r"250 rows evenly over 8 .*: 248 and 256 rows.*pad=Tr",
        ),
        (lambda: split([1, 2, 3], 4), r"nearest that works: 4 rows"),
        *(
            (lambda values=values: split(values, 2, how=Dispatch.ALL_TO_ALL), "one entry per rank")
            for values in ([1, 2, 3], {"a": 1, "b": 2}, 5)
        ),
        *(
            (lambda layout=layout: RankLayout(*layout), "exactly one rank each")
            for layout in (
                *(((0, 2), (True, True)), ((0, 0), (True, True))),
                *(((0, 0), (False, False)), ((0, 1), (True, False))),
            )
        ),
        (strip_uneven, "3 result rows for 2 padded rows"),
        (lambda: pad_arguments([[1, 2, 3], [1, 2, 3, 4]], 2), r"\[3, 4\] rows together"),
        (lambda: num_rows({"a": [1, 2], "b": [1, 2, 3]}), r"have \[2, 3\] rows"),
        (lambda: num_rows(3), r"int has no rows.*register_payload\(\)"),
        (lambda: concat_rows([[1], np.array([2])]), r"\['list', 'ndarray'\]"),
    ],
)
def test_what_cannot_be_divided_or_joined_is_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises(DispatchError, match=words):
        act()


def test_what_is_no_payload_or_marked_whole_reaches_every_rank() -> None:
    assert split(0.5, 2) == [0.5, 0.5]
    assert split(Whole(["stop", "end", "x"]), 2) == [["stop", "end", "x"]] * 2


def test_metrics_are_listed_by_dp_rank_of_the_ranks_that_answer() -> None:
    layout = RankLayout((1, 1, 0, 0), (False, True, True, False))
    results = ["r0", {"loss": 1.0}, {"loss": 0.0}, "r3"]
    for how in (Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_METRIC):
        assert how.collect(layout, results) == [{"loss": 0.0}, {"loss": 1.0}]


class Pair(NamedTuple):
    first: list[int]
    second: list[int]


class Text:
    def __init__(self, letters: str) -> None:
        self.letters = letters


register_payload(
    Text,
    PayloadOps(
        num_rows=lambda text: len(text.letters),
        take=lambda text, start, stop: Text(text.letters[start:stop]),
        concat=lambda parts: Text("".join(part.letters for part in parts)),
    ),
)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.data())
def test_rows_taken_in_order_join_to_the_whole(rows: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    whole = {"list": rows, "nested": (np.array(rows), [str(row) for row in rows])}
    parts = [take_rows(whole, 0, cut), take_rows(whole, cut, len(rows))]
    joined = concat_rows(parts)
    assert num_rows(whole) == len(rows)
    assert joined["list"] == rows
    assert joined["nested"][0].tolist() == rows
    assert joined["nested"][1] == whole["nested"][1]


@pytest.mark.parametrize(
    "value", [3, "text", b"bytes", None, np.array(1.0), {}, (), {"loss": 0.5}, Pair([1], [2])]
)
def test_what_has_no_rows_is_no_payload(value: object) -> None:
    assert not is_payload(value)


def test_a_type_that_is_registered_is_a_payload() -> None:
    text = Text("abcdef")
    joined = concat_rows([take_rows(text, 3, 6), take_rows(text, 0, 3)])
    assert is_payload(text)
    assert joined.letters == "defabc"
