"""Arithmetic as an environment of verifiers 0.1: a calculator, and a rubric of two functions."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * and parentheses.
    """
    if not set(expression) <= set("0123456789+-*()") or "**" in expression:
        raise ValueError("not arithmetic")
    return str(eval(expression, {}))


async def is_right(completion: Any, answer: str) -> float:
    return float((completion[-1].content or "").strip() == answer)


async def has_digits(completion: Any) -> float:
    said = "".join(m.content or "" for m in completion if m.role == "assistant")
    return sum(letter in "0123456789" for letter in said) / max(len(said), 1)


def load_environment() -> vf.Environment:
    asked = [f"{n}+7*{n + 2}" for n in range(2, 10)]
    rows = [{"question": text, "answer": str(eval(text))} for text in asked]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[calculator],
        max_turns=4,
        rubric=vf.Rubric(funcs=[is_right, has_digits], weights=[1.0, 0.25]),
    )
