"""A task for conversations with tools: arithmetic of two or three steps, ``(17+5)*12``.

A small model cannot compute the answer. It can ask the tool ``calculator`` and repeat its result.
The conversations that teach a starter model call the tool in a third of cases, and answer at once
in the others. So it knows the form of a call, and reinforcement learning finds out that calls pay.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from hybridrl.data.rows import Message, Row
from hybridrl.data.sort_digits import Split

_EVAL_SHARE = 8  # one expression in eight
_LARGEST_NUMBER = 20
_OPERATORS = "+-*"
_CALL_SHARE = 0.35  # of the worked conversations


def build_calculator_rows(
    num_rows: int, *, split: Split, seed: int, has_conversations: bool = False
) -> list[Row]:
    """Make rows; the same arguments make the same rows.

    Whether an expression is for training or for evaluation depends on it alone, so the two never
    meet, whatever the seeds.

    Args:
        split: ``eval`` expressions are one in eight of all.
        has_conversations: in some rows the prompt holds the call of the tool and its result, too,
            for supervised fine-tuning of all turns.
    """
    source = random.Random(f"calculator {split} {seed}")
    rows = []
    for index, (expression, value) in zip(range(num_rows), _draw(source, split), strict=False):
        prompt: tuple[Message, ...] = (Message("user", expression),)
        if has_conversations and source.random() < _CALL_SHARE:
            call = f"[calculator(expression='{expression}')]"
            prompt = (*prompt, Message("assistant", call), Message("tool", str(value)))
        rows.append(
            Row(
                prompt=prompt,
                answer=str(value),
                source="calculator",
                origin=f"calculator/{split}:{index + 1}",
            )
        )
    return rows


def _draw(source: random.Random, split: Split) -> Iterator[tuple[str, int]]:
    while True:
        expression, value = str(first := source.randint(1, _LARGEST_NUMBER)), first
        num_steps = source.choice((2, 3))
        for step in range(num_steps):
            number, operator = source.randint(1, _LARGEST_NUMBER), source.choice(_OPERATORS)
            left = f"({expression})" if operator == "*" and step else expression
            expression = f"{left}{operator}{number}"
            value = {"+": value + number, "-": value - number, "*": value * number}[operator]
        digest = hashlib.blake2b(expression.encode(), digest_size=1).digest()
        if (digest[0] % _EVAL_SHARE == 0) == (split == "eval"):
            yield expression, value
