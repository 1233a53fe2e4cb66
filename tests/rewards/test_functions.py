from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.functions import exact_match, sorted_prefix


def test_exact_match_ignores_only_surrounding_white_space() -> None:
    assert exact_match([" 42\n", "42.", "", "4 2"], ["42"] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("1134", 1.0),
        ("", 0.0),
        ("11", 0.5),
        ("1143", 0.5),
        ("4311", 0.0),
        ("11345", 0.8),
        ("9" * 50, 0.0),
    ],
)
def test_sorted_prefix_is_the_fraction_before_the_first_error(response: str, reward: float) -> None:
    assert sorted_prefix([response], ["1134"]) == [pytest.approx(reward)]


@given(st.text("0123456789", min_size=1), st.text("0123456789"))
def test_only_the_exact_answer_gets_the_whole_reward(answer: str, response: str) -> None:
    (dense,) = sorted_prefix([response], [answer])
    assert 0.0 <= dense <= 1.0
    assert (dense == 1.0) == (exact_match([response], [answer]) == [1.0])
