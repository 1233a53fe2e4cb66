"""From rewards to advantages of tokens, on the driver."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from hybridrl.algorithms.advantages import grpo_advantages
from hybridrl.algorithms.gae import AdvantageEstimate, generalized_advantages, whiten
from hybridrl.algorithms.kl import estimate_response_kl, subtract_sequence_kl
from hybridrl.batch import (
    LogprobBatch,
    RolloutBatch,
    jagged_from,
    place_on_last_tokens,
    row_lengths,
    spread_over_tokens,
)
from hybridrl.config.algorithm import GAEConfig, KLConfig
from hybridrl.errors import TrainingError
from hybridrl.metrics import Mean, Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRelative:
    """GRPO: each response against its group; the same value for all its tokens."""

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
        old_BL, reference_BL = _both_logprobs(logprobs)
        charged_B = subtract_sequence_kl(
            rewards_B,
            old_logprobs_BL=old_BL,
            reference_logprobs_BL=reference_BL,
            response_mask_BL=rollouts.response_mask_BL,
            estimator=self.kl.estimator,
            coefficient=self.kl.coefficient,
        )
        return self.group(charged_B, rollouts, logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generalized:
    """PPO: each token against the critic's value before it."""

    gae: GAEConfig
    kl: KLConfig

    def __call__(
        self, rewards_B: Tensor, rollouts: RolloutBatch, logprobs: LogprobBatch, values_BL: Tensor
    ) -> AdvantageEstimate:
        """Return advantages and returns, both jagged float32 [B, L], 0 outside the response.

        A response's reward is earned by its last token; with ``kl.placement=reward`` each token
        pays for leaving the reference where it does so. The returns stay in reward units when the
        advantages are whitened.

        Raises:
            TrainingError: a KL charge without old or reference log-probs.
        """
        mask_BL = rollouts.response_mask_BL
        rewards_BL = place_on_last_tokens(rewards_B, mask_BL)
        if self.kl.placement == "reward":
            kl_BL = estimate_response_kl(
                *_both_logprobs(logprobs), mask_BL, estimator=self.kl.estimator
            )
            rewards_T = rewards_BL.values() - self.kl.coefficient * kl_BL.values()
            rewards_BL = jagged_from(rewards_T, row_lengths(mask_BL))
        estimate = generalized_advantages(
            rewards_BL,
            values_BL=values_BL,
            response_mask_BL=mask_BL,
            gamma=self.gae.gamma,
            lam=self.gae.lam,
        )
        if not self.gae.whiten:
            return estimate
        return replace(estimate, advantages_BL=whiten(estimate.advantages_BL, mask_BL))


@dataclass(frozen=True, slots=True)
class KLCharge:
    """Computes the KL penalty on rewards."""

    kl: KLConfig

    def __call__(self, rollouts: RolloutBatch, logprobs: LogprobBatch) -> Metrics:
        """Return the mean over the responses of a step; nothing where none pays.

        Raises:
            TrainingError: old or reference log-probs were not computed.
        """
        if self.kl.placement != "reward":
            return {}
        kl_BL = estimate_response_kl(
            *_both_logprobs(logprobs), rollouts.response_mask_BL, estimator=self.kl.estimator
        )
        total = self.kl.coefficient * float(kl_BL.values().double().sum())
        return {"reward/kl_charge/mean": Mean(total, len(rollouts))}


def describe_values(estimate: AdvantageEstimate, values_BL: Tensor, mask_BL: Tensor) -> Metrics:
    """Measure how well the critic predicted the returns of a step's response tokens."""
    mask_T = mask_BL.values()
    values_S = values_BL.values()[mask_T].double()
    returns_S = estimate.returns_BL.values()[mask_T].double()
    if not len(returns_S):
        return {}
    metrics: Metrics = {
        "critic/value/mean": Mean(float(values_S.sum()), len(values_S)),
        "critic/return/mean": Mean(float(returns_S.sum()), len(returns_S)),
    }
    variance = float(returns_S.var(correction=0))
    if variance > 0:
        missed = float((returns_S - values_S).var(correction=0))
        metrics["critic/explained_variance"] = Mean(1 - missed / variance)
    return metrics


def _both_logprobs(logprobs: LogprobBatch) -> tuple[Tensor, Tensor]:
    if logprobs.old_logprobs_BL is None or logprobs.reference_logprobs_BL is None:
        raise TrainingError(
            "algorithm.kl.placement=reward needs old and reference log-probs; "
            "set algorithm.old_logprobs=recompute"
        )
    return logprobs.old_logprobs_BL, logprobs.reference_logprobs_BL
