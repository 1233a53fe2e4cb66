from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import DispatchError
from hybridrl.single_controller import PayloadOps, register_payload
from hybridrl.single_controller.payload import concat_rows, is_payload, num_rows, take_rows


class Pair(NamedTuple):
    first: list[int]
    second: list[int]


class Text:
    """A type of one's own."""

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


def test_members_of_different_length_are_refused() -> None:
    with pytest.raises(DispatchError, match=r"have \[2, 3\] rows"):
        num_rows({"a": [1, 2], "b": [1, 2, 3]})


def test_results_of_different_types_are_not_joined() -> None:
    with pytest.raises(DispatchError, match=r"\['list', 'ndarray'\]"):
        concat_rows([[1], np.array([2])])


def test_what_has_no_rows_says_how_to_get_some() -> None:
    with pytest.raises(DispatchError, match=r"int has no rows.*register_payload\(\)"):
        num_rows(3)
