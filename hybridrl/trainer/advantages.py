"""How the driver turns rewards into advantages of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridrl.algorithms.advantages import grpo_advantages
from hybridrl.algorithms.kl import subtract_sequence_kl
from hybridrl.batch import LogprobBatch, RolloutBatch, spread_over_tokens
from hybridrl.config.algorithm import KLConfig
from hybridrl.errors import TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRelative:
    """GRPO: each response against its siblings; the same value for all its tokens."""

    num_responses: int
    """Group size G >= 2."""

    divide_by_std: bool
    """True is GRPO, False Dr. GRPO."""

    def __call__(self, rewards_B: Tensor, rollouts: RolloutBatch, logprobs: LogprobBatch) -> Tensor:
        """Return jagged float32 [B, L], 0 outside the response."""
        advantages_B = grpo_advantages(
            rewards_B, num_responses=self.num_responses, divide_by_std=self.divide_by_std
        )
        return spread_over_tokens(advantages_B, rollouts.response_mask_BL)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRelativeWithKL:
    """GRPO in which each response first pays for leaving the reference policy."""

    group: GroupRelative
    kl: KLConfig

    def __call__(self, rewards_B: Tensor, rollouts: RolloutBatch, logprobs: LogprobBatch) -> Tensor:
        """Return jagged float32 [B, L], 0 outside the response.

        Raises:
            TrainingError: old or reference log-probs were not computed.
        """
        if logprobs.old_logprobs_BL is None or logprobs.reference_logprobs_BL is None:
            raise TrainingError(
                "algorithm.kl.placement=reward needs old and reference log-probs; "
                "set algorithm.old_logprobs=recompute"
            )
        charged_B = subtract_sequence_kl(
            rewards_B,
            old_logprobs_BL=logprobs.old_logprobs_BL,
            reference_logprobs_BL=logprobs.reference_logprobs_BL,
            response_mask_BL=rollouts.response_mask_BL,
            estimator=self.kl.estimator,
            coefficient=self.kl.coefficient,
        )
        return self.group(charged_B, rollouts, logprobs)
