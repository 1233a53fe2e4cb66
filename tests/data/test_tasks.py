from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hybridrl.data.rows import Message, Row
from hybridrl.data.tasks import Split, build_calculator_rows, build_sort_digits_rows
from hybridrl.errors import DataError


def build(num_rows: int, split: Split = "train", *, seed: int = 0) -> list[Row]:
    return build_sort_digits_rows(num_rows, split=split, seed=seed, min_digits=2, max_digits=20)


def test_the_answer_is_the_sorted_digits() -> None:
    for row in build(200):
        assert isinstance(row.prompt, str)
        assert row.prompt[-1] == "="
        assert row.answer == "".join(sorted(row.prompt[:-1]))
        assert 2 <= len(row.answer) <= 20


def calculate(num_rows: int, split: Split, *, seed: int) -> list[Row]:
    return build_calculator_rows(num_rows, split=split, seed=seed)


@pytest.mark.parametrize(("build", "num_short"), [(build, 5), (calculate, -1)])
def test_training_and_evaluation_never_meet_whatever_the_seeds(
    build: Callable[..., list[Row]], num_short: int
) -> None:
    train = {row.prompt for seed in range(3) for row in build(3000, "train", seed=seed)}
    held_out = {row.prompt for seed in range(3) for row in build(1000, "eval", seed=seed)}
    assert not train & held_out
    # Also not among the few short ones.
    assert sum(len(str(prompt)) == 3 for prompt in held_out) > num_short


def test_the_same_arguments_make_the_same_rows() -> None:
    assert build(50) == build(50) == build(80)[:50]
    assert build(50) != build(50, seed=1)


def test_lengths_are_uniform() -> None:
    counts = Counter(len(row.answer) for row in build(9500))
    assert set(counts) == set(range(2, 21))
    assert min(counts.values()) > 400  # 500 expected, standard deviation 22
    assert max(counts.values()) < 600


def test_a_length_without_numbers_for_a_split_is_an_error() -> None:
    with pytest.raises(DataError, match=r"no number of 1 digits for eval"):
        build_sort_digits_rows(1, split="eval", seed=0, min_digits=1, max_digits=1)


def test_the_answer_is_the_value_of_the_expression() -> None:
    for row in build_calculator_rows(200, split="train", seed=0):
        message = row.prompt[0]
        assert isinstance(message, Message)
        assert sum(message.content.count(operator) for operator in "+-*") in (2, 3)
        assert row.answer == str(eval(message.content))


def test_worked_conversations_call_the_tool_or_answer_at_once() -> None:
    rows = build_calculator_rows(400, split="train", seed=0, has_conversations=True)

    worked = [row for row in rows if len(row.prompt) > 1]
    for row in worked:
        question = row.prompt[0]
        assert isinstance(question, Message)
        assert row.prompt[1:] == (
            Message("assistant", f"[calculator(expression='{question.content}')]"),
            Message("tool", row.answer),
        )
    assert 100 < len(worked) < 180
