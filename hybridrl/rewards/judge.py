"""The reward that a served language model gives: a score that is read from its answer.

``trainer/reward_models.py`` puts the questions. This function reads the answers in a reward
process, which has a deadline: an expression may take exponential time.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import Field

from hybridrl.config.limits import Tokens


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
