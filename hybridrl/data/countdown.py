"""Countdown: make a target out of some numbers with + - * /, each number once.

The answer is one solution, ``(44+19)+35``. It states the task for a reward function: a response is
right if it uses the same numbers and has the same value.
"""

from __future__ import annotations

import random
from fractions import Fraction

_LARGEST_NUMBER = 99
_LARGEST_TARGET = 999
_MIN_NUMBERS, _MAX_NUMBERS = 3, 4
_PROMPT = (
    "Using the numbers {numbers}, make an expression that equals {target}. Use + - * / and "
    r"parentheses, and each number exactly once. Put the expression in \boxed{{}}."
)


def make_countdown(num_rows: int, *, split: str, seed: int) -> list[dict[str, object]]:
    """Make rows; the same arguments make the same rows, and no two have the same prompt.

    Args:
        split: ``train`` and ``test`` have different rows with the same seed.
    """
    source = random.Random(f"countdown {split} {seed}")
    rows: dict[str, dict[str, object]] = {}
    while len(rows) < num_rows:
        num_numbers = source.randint(_MIN_NUMBERS, _MAX_NUMBERS)
        numbers = [source.randint(1, _LARGEST_NUMBER) for _ in range(num_numbers)]
        # A sum that divides by 8 is for the test: no seeds make a prompt of both splits.
        if (sum(numbers) % 8 == 0) != (split == "test"):
            continue
        expression, target = _combine([(str(n), Fraction(n)) for n in numbers], source)
        if target.denominator != 1 or not 1 <= target <= _LARGEST_TARGET:
            continue
        source.shuffle(numbers)
        prompt = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
        row = {"prompt": prompt, "answer": expression, "source": "countdown"}
        rows.setdefault(prompt, row | {"difficulty": num_numbers})
    return list(rows.values())


def _combine(terms: list[tuple[str, Fraction]], source: random.Random) -> tuple[str, Fraction]:
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(source.randrange(len(terms))) for _ in range(2))
        sign = source.choice("+-*/" if b else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[sign]
        terms.append((f"({left}{sign}{right})", value))
    expression, value = terms[0]
    return expression[1:-1], value
