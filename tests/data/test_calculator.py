from __future__ import annotations

from hybridrl.data.rows import Message
from hybridrl.data.tasks import build_calculator_rows


def test_the_answer_is_the_value_of_the_expression() -> None:
    for row in build_calculator_rows(200, split="train", seed=0):
        message = row.prompt[0]
        assert isinstance(message, Message)
        assert sum(message.content.count(operator) for operator in "+-*") in (2, 3)
        assert row.answer == str(eval(message.content))


def test_training_and_evaluation_never_meet_whatever_the_seeds() -> None:
    train, held_out = (
        {
            row.prompt
            for seed in range(3)
            for row in build_calculator_rows(2000, split=split, seed=seed)
        }
        for split in ("train", "eval")
    )
    assert not train & held_out


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
