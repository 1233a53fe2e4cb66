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
    """Evaluate before the first step, every this many steps, and after the last. 0: never."""

    num_prompts: Rows
    """Held-out prompts: made by a built-in task, or the first rows of the files."""

    num_responses_per_prompt: Rows
    """Responses per prompt; the mean reward is taken over all of them."""

    temperature: Annotated[float, Within(at_least=0.0, at_most=100.0, why=TOO_HOT)]
    """0 is greedy decoding; any other value is at least 0.001, or logits would overflow."""
