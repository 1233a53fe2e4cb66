"""The reward that a model gives. Ranks compute its scores; see ``trainer/reward_models.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field


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
