"""Built-in reward functions: quick, without failures, run in the driver.

Each takes the columns it needs by keyword and ignores the rest, as a user's own function does:
``def my_reward(responses, answers, prompts, sources) -> list[float]``.
"""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(responses: Sequence[str], answers: Sequence[str], **_: object) -> list[float]:
    """Give 1 to a response that equals the answer but for white space around it, else 0."""
    return [
        float(response.strip() == answer.strip())
        for response, answer in zip(responses, answers, strict=True)
    ]


def sorted_prefix(responses: Sequence[str], answers: Sequence[str], **_: object) -> list[float]:
    """Give the share of the answer that the response has right before its first wrong character.

    A dense reward for ``sort_digits``. Text after a complete answer counts as one more wrong
    character, so that only the exact answer gets 1.
    """
    return [
        _share_right(response.strip(), answer.strip())
        for response, answer in zip(responses, answers, strict=True)
    ]


def _share_right(response: str, answer: str) -> float:
    num_right = 0
    for token, wanted in zip(response, answer, strict=False):
        if token != wanted:
            break
        num_right += 1
    return num_right / (len(answer) + (len(response) > len(answer)))
