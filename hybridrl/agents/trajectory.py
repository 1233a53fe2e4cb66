"""A finished conversation: the tokens of its turns, exactly as they were sampled or appended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridrl.workers.rollout.sampler import Sample

Ended = Literal["answer", "turns", "tokens", "time", "error"]
"""Why a conversation ended: the agent was done, or the limit or error that ended it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one message, or of several that were appended together."""

    token_ids: Tensor
    """int64 [n]."""

    logprobs: Tensor | None
    """float32 [n] nats, of the sampler; None for tokens that the policy did not choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The turns behind a prompt."""

    turns: tuple[Turn, ...]
    """At least one; the first and the last were sampled."""

    ended: Ended

    weight_version: int
    """Policy version of the weights that sampled the last turn."""

    num_tool_calls: int
    num_tool_errors: int
    tool_seconds: float
    """Of all calls; those of a turn may run at the same time."""

    @property
    def num_sampled_turns(self) -> int:
        """Return the number of the assistant's turns."""
        return sum(turn.logprobs is not None for turn in self.turns)

    @property
    def num_appended_tokens(self) -> int:
        """Return the tokens that the policy did not choose."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.logprobs is None)

    def to_sample(self) -> Sample:
        """Return the tokens of all turns as one continuation of the prompt."""
        logprobs, is_sampled = [], []
        for turn in self.turns:
            zeros = torch.zeros(len(turn.token_ids))
            logprobs.append(zeros if turn.logprobs is None else turn.logprobs)
            is_sampled.append(torch.full_like(zeros, turn.logprobs is not None, dtype=torch.bool))
        return Sample(
            token_ids=torch.cat([turn.token_ids for turn in self.turns]),
            logprobs=torch.cat(logprobs),
            finish_reason="stop" if self.ended == "answer" else "length",
            weight_version=self.weight_version,
            is_sampled=torch.cat(is_sampled),
        )
