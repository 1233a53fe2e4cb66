from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.functions import exact_match, format, length, numeric, sorted_prefix


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


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so 6 x 7 = 42.", "42", 1.0),
        ("42, or rather 41", "42", 0.0),
        ("1,234.50 in all", "#### 1234.5", 1.0),
        ("-.5e1", "-5", 1.0),
        ("12%", "0.12", 1.0),
        ("3.0000001", "3", 1.0),
        ("3.001", "3", 0.0),
        ("none", "3", 0.0),
        ("1e999", "3", 0.0),
    ],
)
def test_numeric_compares_the_last_numbers(response: str, answer: str, reward: float) -> None:
    assert numeric(response, answer) == reward


def test_numeric_takes_tolerances_and_refuses_an_answer_without_number() -> None:
    assert numeric("3.001", "3", relative_tolerance=0.01) == 1.0
    assert numeric("0.001", "0", absolute_tolerance=0.01) == 1.0
    with pytest.raises(ValueError, match="'three' has no number"):
        numeric("3", "three")


def test_format_matches_all_of_the_text_or_a_part() -> None:
    pattern = r"<think>.*</think>\s*\d+"
    assert format(" <think>a\nb</think> 42\n", pattern=pattern) == 1.0
    assert format("well: <think></think> 42", pattern=pattern) == 0.0
    assert format("well: <think></think> 42", pattern=pattern, match="search") == 1.0


def test_length_charges_beyond_a_budget_or_away_from_a_target() -> None:
    assert [length(n, tokens=10, per_token=0.5) for n in (9, 10, 12)] == [0.0, 0.0, -1.0]
    assert [length(n, tokens=10, mode="target") for n in (9, 12)] == [-0.001, -0.002]
