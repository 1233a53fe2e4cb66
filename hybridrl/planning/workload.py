"""The rows that one rollout engine samples in a step, all as long as the configuration allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hybridrl.config.experiment import ExperimentConfig

_PREFILL_TOKENS = 4096
"""Tokens of one prefill pass of the embedded engine, with padding (rollout/embedded/prefill.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows of one rank's engine."""

    num_rows: int

    group_size: int
    """Responses to one prompt among them."""

    num_prompt_tokens: int
    num_response_tokens: int

    @classmethod
    def longest(cls, config: ExperimentConfig) -> Self:
        """Assume that every prompt and every response has the greatest length allowed."""
        num_ranks = config.cluster.num_ranks
        return cls(
            num_rows=max(1, config.num_rows_per_step // num_ranks),
            group_size=max(1, config.rollout.num_responses_per_prompt // num_ranks),
            num_prompt_tokens=config.data.max_prompt_tokens,
            num_response_tokens=config.rollout.max_response_tokens,
        )

    @property
    def num_row_tokens(self) -> int:
        """Tokens of a row."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of one pass of the embedded engine."""
        num_prompts = -(-self.num_rows // self.group_size)
        return max(
            self.num_prompt_tokens, min(_PREFILL_TOKENS, num_prompts * self.num_prompt_tokens)
        )
