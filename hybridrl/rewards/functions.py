"""Built-in reward functions of text alone, of scores, and of what a judge answered.

They are written as a user's own: columns by name (``responses`` for several rows in a call,
``response`` for one), and after the star arguments of ``reward.args``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import Tokens, TokensOrZero

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?%?")
_MOST_DIGITS = 400


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
    rewards = []
    for response, answer in zip(responses, answers, strict=True):
        given, wanted = response.strip(), answer.strip()
        num_right = len([*takewhile(bool, map(eq, given, wanted))])
        rewards.append(num_right / (len(wanted) + (len(given) > len(wanted))))
    return rewards


def numeric(
    response: str,
    answer: str,
    *,
    relative_tolerance: Annotated[float, Field(ge=0.0, le=1.0, description="100%")] = 1e-6,
    absolute_tolerance: Annotated[float, Field(ge=0.0, le=1e15, description="a reward")] = 0.0,
) -> float:
    """Give 1 if the last number of the response is the last one of the answer, else 0.

    Both tolerances are those of `math.isclose`. ``1,234.5``, ``1.5e3`` and ``12%`` (0.12) are
    numbers. A response without a number gets 0; an answer without one is an error.

    Raises:
        ValueError: the answer has no number.
    """
    wanted = last_number(answer)
    if wanted is None:
        raise ValueError(f"the answer {answer[:80]!r} has no number")
    given = last_number(response)
    return float(
        given is not None
        and math.isclose(given, wanted, rel_tol=relative_tolerance, abs_tol=absolute_tolerance)
    )


def last_number(text: str) -> float | None:
    """Return the last finite number in a text; None if there is none."""
    for match in reversed(list(_NUMBER.finditer(text))):
        digits = match.group().replace(",", "")[:_MOST_DIGITS]
        value = float(digits.removesuffix("%")) / (100 if digits.endswith("%") else 1)
        if math.isfinite(value):
            return value
    return None


def format(response: str, *, pattern: str, match: Literal["full", "search"] = "full") -> float:
    r"""Give 1 to a response that a regular expression matches, else 0.

    ``full`` asks for all of the response, without the white space around it; ``search`` for any
    part. A dot matches a line break, too. Runs in a process with a deadline: an expression may take
    exponential time.
    """
    text = response.strip()
    expression = re.compile(pattern, re.DOTALL)
    given = expression.fullmatch(text) if match == "full" else expression.search(text)
    return float(given is not None)


def length(
    length: int,
    *,
    tokens: TokensOrZero,
    per_token: Annotated[float, Field(ge=0.0, le=1e6, description="a reward")] = 0.001,
    mode: Literal["budget", "target"] = "budget",
) -> float:
    """Charge ``per_token`` for each token beyond a budget, or away from a target; 0 is best."""
    distance = max(0, length - tokens) if mode == "budget" else abs(length - tokens)
    return -per_token * distance


def agent(scores: Sequence[float]) -> list[float]:
    """Return the rewards that the agent, or its environment, gave to the turns, added up.

    Advantages of tokens and turns see each at its turn.
    """
    return list(scores)


def model(
    scores: Sequence[float],
    *,
    path: str,
    mean: Annotated[float, Field(ge=-1e6, le=1e6, description="a score")] = 0.0,
    std: Annotated[float, Field(gt=0.0, le=1e6, examples=[1.0], description="a score")] = 1.0,
) -> list[float]:
    """Return the scores of the reward model in ``path``, less ``mean``, over ``std``.

    ``path`` is a Hugging Face folder of a classifier with one label. Its own tokenizer and chat
    template render prompt and response; the score is that of the last token.
    """
    return [(score - mean) / std for score in scores]


def judge(  # noqa: PLR0913 - its arguments are keys of the configuration
    response: str,
    *,
    model: str,
    template: str,
    pattern: str = r"(?i)score\D{0,3}?(-?\d+(?:\.\d+)?)",
    lowest: Annotated[float, Field(ge=-1e6, le=1e6, description="a score")] = 0.0,
    highest: Annotated[float, Field(ge=-1e6, le=1e6, description="a score")] = 10.0,
    missing_score: Annotated[float, Field(ge=-1e6, le=1e6, description="a score")] = 0.0,
    max_tokens: Tokens = 64,
    temperature: Annotated[float, Field(ge=0.0, le=100.0, description="nearly uniform")] = 0.0,
    top_p: Annotated[float, Field(gt=0.0, le=1.0, examples=[1.0], description="a share")] = 1.0,
) -> float:
    """Return the score in a judge's answer; NaN if it has none.

    Args:
        response: the answer of the judge.
        model: name of the judge in ``serving.models``.
        template: of the question. ``{prompt}``, ``{response}``, ``{answer}`` and ``{source}`` stand
            for the row's columns; a chat template of the judge makes it the turn of a user.
        pattern: regular expression; its last match counts, and of that the first group.
        lowest: an answer with a lower score has none.
        highest: an answer with a higher score has none.
        missing_score: reward of a response about which the judge's answer has no score.
        max_tokens: of an answer.
        temperature: of the judge's sampling; 0 is greedy.
        top_p: nucleus of the judge's sampling.
    """
    matches = list(re.finditer(pattern, response))
    if not matches:
        return math.nan
    try:
        score = float(matches[-1].group(1 if matches[-1].re.groups else 0))
    except (TypeError, ValueError):  # the group took no part, or holds another text
        return math.nan
    return score if lowest <= score <= highest else math.nan
