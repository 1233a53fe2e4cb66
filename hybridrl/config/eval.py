"""The ``eval`` section."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.limits import Count, CountOrZero, NotNegative


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out prompts. Mirrors hydra_configs/eval/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Evaluate before the first step, after every so many steps, and after the last. 0 is never."""

    num_prompts: Count
    """Held-out prompts; a built-in task makes them, files give their first ones."""

    num_responses_per_prompt: Count
    """Responses a prompt; the mean reward is taken over all of them."""

    temperature: NotNegative
    """0 is greedy decoding."""
