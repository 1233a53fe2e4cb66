"""The ``eval`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hybridrl.config.limits import CountOrZero, Rows, Within
from hybridrl.config.rollout import TOO_HOT


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out prompts. Mirrors hydra_configs/eval/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Evaluate before the first step, after every so many steps, and after the last. 0 is never."""

    num_prompts: Rows
    """Held-out prompts; a built-in task makes them, files give their first ones."""

    num_responses_per_prompt: Rows
    """Responses a prompt; the mean reward is taken over all of them."""

    temperature: Annotated[float, Within(at_least=0.0, at_most=100.0, why=TOO_HOT)]
    """0 is greedy decoding; anything else at least 0.001, or logits would overflow."""
