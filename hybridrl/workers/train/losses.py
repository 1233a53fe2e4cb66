"""The losses of a training engine, from log-probs to one scalar and its metrics.

Legend: T or S packed response tokens of one micro-batch; P pairs, whose last axis in [P, 2] is the
chosen and the rejected answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.kl import KLGradient, clamped_log_ratio, k3, kl_penalty
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.preference_losses import PreferenceLoss
from hybridrl.algorithms.rollout_correction import SamplerCorrection
from hybridrl.errors import DriftError, TrainingError
from hybridrl.metrics import Max, Mean, Metrics
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.protocol import TokenLossInputs

_K3 = Part.of(k3)

_DEPTHS = (1024, 8192, 65_536)
_NAMES_OF_DEPTHS = ("below_1k", "below_8k", "below_64k", "from_64k")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientLoss:
    """A policy loss, with optional KL penalty, entropy bonus and correction for the sampler."""

    policy_loss: Part  # of algorithms/policy_losses
    kl_estimator: Part = _K3  # of algorithms/kl.py
    kl_gradient: KLGradient = "value"  # see algorithms/kl.py
    kl_coefficient: float = 0.0  # 0 only measures the KL, if there is a reference
    entropy_coefficient: float = 0.0
    divergence_coefficient: float = 0.0  # of the divergence from a teacher, if rows have its tokens
    token_mask: Part | None = None  # leaves tokens out; see algorithms/token_masks.py
    correction: Part | None = None
    """Weighs tokens that trainer and sampler find unequally likely, by the update's own log-probs.
    Where old ones were computed before, the batch has the weights."""

    is_old_the_sampler: bool = False
    """Whether the old log-probs are the sampler's (bypass mode), so that only the current ones
    measure the distance of trainer and sampler."""

    max_drift_nats: float | None = None
    """Largest mean distance of trainer's and sampler's log-probs in a micro-batch; None is off."""

    policy_version: int = 0
    """Of the weights before the update: where tokens have versions, only those of this version are
    compared, because others were sampled by another policy."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy is part of the loss, and not only a metric."""
        return self.entropy_coefficient > 0.0

    def __call__(self, inputs: TokenLossInputs) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the global loss, to be *summed*, and its metrics.

        Without tokens the share is a 0 that carries a gradient, and metrics are empty.
        A DriftError if another policy sampled the responses, a TrainingError if a part fails, a
        ValueError for a KL penalty without reference log-probs.
        """
        surrogate = self._surrogate(inputs)
        trainer = inputs.current_logprobs_T if self.is_old_the_sampler else inputs.old_logprobs_T
        means, maxima, parts = _describe(inputs, surrogate, trainer.detach(), self.policy_version)
        losses_T = surrogate.losses_T
        if self.token_mask is not None:
            keep_T = self._call(self.token_mask, inputs)
            losses_T = torch.where(keep_T, losses_T, 0.0)
            means["policy/masked_token_fraction"] = 1 - keep_T.float().mean()
        sampler_weights_T = inputs.sampler_weights_T
        if sampler_weights_T is None and self.correction is not None:
            correction: SamplerCorrection = self.correction(
                old_logprobs_T=inputs.current_logprobs_T.detach(),
                sampler_logprobs_T=inputs.sampler_logprobs_T,
                rows=inputs.rows,
            )
            sampler_weights_T = correction.weights_T
        if sampler_weights_T is not None:
            losses_T = losses_T * sampler_weights_T
            means["policy/sampler_weight/mean"] = sampler_weights_T.mean()
        shares = {"loss/policy": (losses_T * inputs.weights_T).sum()}
        if self.kl_coefficient:
            penalty = (self._kl_to_reference(inputs) * inputs.weights_T).sum()
            shares["loss/kl"] = self.kl_coefficient * penalty
        if self.entropy_coefficient:
            bonus = (inputs.entropy_T * inputs.weights_T).sum()
            shares["loss/entropy"] = -self.entropy_coefficient * bonus
        if inputs.divergences_T is not None:
            divergence = (inputs.divergences_T * inputs.weights_T).sum()
            shares["loss/divergence"] = self.divergence_coefficient * divergence
        loss = torch.stack(list(shares.values())).sum()
        metrics = _to_metrics(
            inputs.weights_T, shares=shares, means=means, maxima=maxima, parts=parts
        )
        self._require_same_policy(metrics)
        return loss, metrics

    def _require_same_policy(self, metrics: Metrics) -> None:
        mean = metrics.get("policy/sampler_mismatch_nats/mean")
        largest = metrics.get("policy/sampler_mismatch_nats/max")
        limit = self.max_drift_nats
        if limit is None or mean is None or largest is None:
            return
        if not mean.value <= limit:  # a mean that is not a number, too
            raise DriftError(
                "trainer and rollout engine are not the same policy: log-probs of the tokens in a "
                f"micro-batch differ by {mean.value:.3g} nats on average and {largest.value:.3g} "
                f"nats at most; rollout.canary_max_drift_nats={limit:g} is the limit of the "
                "average. No optimizer step was taken from these tokens. If the engine loses its "
                "weights while it sleeps, set rollout.backup_weights=always or "
                "rollout.sleep=false; if its number type is coarser, rollout.dtype=float32; if "
                "that is only rounding, raise rollout.canary_max_drift_nats"
            )

    def _call(self, part: Part, inputs: TokenLossInputs) -> Any:  # noqa: ANN401 - by the part
        return part(
            current_logprobs_T=inputs.current_logprobs_T,
            old_logprobs_T=inputs.old_logprobs_T,
            sampler_logprobs_T=inputs.sampler_logprobs_T,
            advantages_T=inputs.advantages_T,
            entropy_T=inputs.entropy_T.detach(),
            rows=inputs.rows,
        )

    def _surrogate(self, inputs: TokenLossInputs) -> PolicyLoss:
        result = self._call(self.policy_loss, inputs)
        losses_T = result.losses_T if isinstance(result, PolicyLoss) else result
        _require_losses(self.policy_loss, losses_T, len(inputs.advantages_T), "tokens")
        if isinstance(result, PolicyLoss):
            return result
        log_ratio_T = clamped_log_ratio(inputs.current_logprobs_T, inputs.old_logprobs_T)
        unclipped_T = torch.zeros_like(losses_T, dtype=torch.bool)
        return PolicyLoss(losses_T, log_ratio_T.detach().exp(), unclipped_T, unclipped_T)

    def _kl_to_reference(self, inputs: TokenLossInputs) -> Tensor:
        if inputs.reference_logprobs_T is None:
            raise ValueError(
                f"kl_coefficient={self.kl_coefficient}, but the batch has no reference log-probs; "
                "set algorithm.kl.placement=none, or let compute_logprobs fill them"
            )
        return kl_penalty(
            inputs.current_logprobs_T,
            inputs.old_logprobs_T,
            inputs.reference_logprobs_T,
            estimator=self.kl_estimator,
            gradient=self.kl_gradient,
        )


def _require_losses(part: Part, losses: object, count: int, what: str) -> None:
    """Refuse what a part returned, unless it is one loss of each."""
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses)
        raise TrainingError(
            f"{part.key}={part.spelled} returned {shape}; return the loss of each of {count} {what}"
        )


def supervised_loss(logprobs_T: Tensor, weights_T: Tensor) -> tuple[Tensor, Metrics]:
    """Weigh the negative log-likelihood of the given tokens; see ``PolicyGradientLoss``."""
    loss = -(logprobs_T * weights_T).sum()
    shares = {"loss/supervised_nats": loss}
    return loss, _to_metrics(weights_T, shares=shares, means={}, maxima={}, parts={})


@torch.no_grad()
def _describe(
    inputs: TokenLossInputs,
    surrogate: PolicyLoss,
    trainer_logprobs_T: Tensor,
    policy_version: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Measure the change of the policy: scalars to average, scalars whose maximum counts, parts."""
    current_T, old_T = inputs.current_logprobs_T, inputs.old_logprobs_T
    mismatch_T = (trainer_logprobs_T - inputs.sampler_logprobs_T).abs()
    if not len(current_T):
        return {}, {}, {}
    sampler_ratio_T = clamped_log_ratio(trainer_logprobs_T, inputs.sampler_logprobs_T).exp()
    means = {
        "policy/entropy_nats/mean": inputs.entropy_T.mean(),
        "policy/clip_low_fraction": surrogate.is_clipped_low_T.float().mean(),
        "policy/clip_high_fraction": surrogate.is_clipped_high_T.float().mean(),
        "policy/ratio/mean": surrogate.ratio_T.mean(),
        # Drawn from the old policy, so this is KL(old || current).
        "policy/kl_to_old_nats/mean": k3(old_T, current_T).mean(),
        "policy/sampler_kl_nats/mean": k3(inputs.sampler_logprobs_T, trainer_logprobs_T).mean(),
        "policy/sampler_ratio/mean": sampler_ratio_T.mean(),
        "policy/sampler_chi_square/mean": sampler_ratio_T.square().mean() - 1,
    }
    if inputs.reference_logprobs_T is not None:
        kl_T = k3(current_T, inputs.reference_logprobs_T)
        means["policy/kl_to_reference_nats/mean"] = kl_T.mean()
    maxima = {
        "policy/ratio/max": surrogate.ratio_T.max(),
        "policy/sampler_ratio/max": sampler_ratio_T.max(),
    }
    parts = _mismatch_of_parts(mismatch_T, inputs, policy_version)
    if inputs.weight_versions_T is not None:  # older tokens are of another policy by purpose
        mismatch_T = mismatch_T[inputs.weight_versions_T == policy_version]
    if len(mismatch_T):
        means["policy/sampler_mismatch_nats/mean"] = mismatch_T.mean()
        maxima["policy/sampler_mismatch_nats/max"] = mismatch_T.max()
    return means, maxima, parts


def _mismatch_of_parts(
    mismatch_T: Tensor, inputs: TokenLossInputs, policy_version: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum what the mean over all tokens hides, by depth and by version; with the tokens of each."""
    is_own_T = torch.ones_like(mismatch_T, dtype=torch.bool)
    parts = {}
    if inputs.weight_versions_T is not None:
        is_own_T = inputs.weight_versions_T == policy_version
        parts["policy/sampler_mismatch_nats/older_versions"] = ~is_own_T
    depth_T = torch.stack([inputs.positions_T >= limit for limit in _DEPTHS]).sum(dim=0)
    for number, name in enumerate(_NAMES_OF_DEPTHS):
        parts[f"policy/sampler_mismatch_nats/{name}"] = is_own_T & (depth_T == number)
    return {
        name: (mismatch_T.masked_fill(~part_T, 0.0).sum(), part_T.sum())
        for name, part_T in parts.items()
    }


def _to_metrics(
    weights_T: Tensor,
    *,
    shares: dict[str, Tensor],
    means: dict[str, Tensor],
    maxima: dict[str, Tensor],
    parts: dict[str, tuple[Tensor, Tensor]],
) -> Metrics:
    """Copy all scalars to the host in one transfer: each ``.item()`` would wait for the device.

    A share of the loss becomes a mean over the weights. Merged, it is the loss per token with the
    weights of the loss; where the weights of a step sum to 1, it is the loss itself. Parts are sums
    over some of the tokens, with their number.
    """
    num_tokens = len(weights_T)
    if not num_tokens:
        return {}
    names = [*shares, *means, *maxima]
    scalars = [*shares.values(), *means.values(), *maxima.values(), weights_T.sum()]
    scalars += [scalar.float() for part in parts.values() for scalar in part]
    values = torch.stack(scalars).detach().tolist()
    weight, sums = values[len(names)], values[len(names) + 1 :]
    metrics: Metrics = {
        name: Mean(total, count)
        for name, total, count in zip(parts, sums[::2], sums[1::2], strict=True)
        if count
    }
    for name, value in zip(names, values[: len(names)], strict=True):
        if name in shares:
            metrics[name] = Mean(value, weight)
        elif name in means:
            metrics[name] = Mean(value * num_tokens, num_tokens)
        else:
            metrics[name] = Max(value)
    return metrics


PairValues: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
"""The loss of each pair, [P], and metrics to average over pairs, each [P]."""

PairLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], PairValues]
"""From sums over the tokens of both answers [P, 2], the numbers of these tokens [P, 2], and the
positions of the pairs in the batch [P]."""


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """A loss of pairs, and the likelihood of the chosen answer beside it."""

    loss: Part  # of algorithms/preference_losses.py
    sft_coefficient: float = 0.0
    """Of the chosen answer's negative log-likelihood per token (arXiv:2404.19733, eq. 1)."""

    def __call__(
        self, policy_P2: Tensor, reference_P2: Tensor | None, lengths_P2: Tensor
    ) -> PairValues:
        """Compare the answers of each pair.

        Args:
            policy_P2: log-probs, sums over the tokens of an answer, nats; may have a gradient.
            reference_P2: likewise; None for a loss that reads no log-ratios.
            lengths_P2: int64, tokens of each answer, at least 1.
        """
        chosen_P, rejected_P = policy_P2.unbind(dim=1)
        lengths_P2 = lengths_P2.to(chosen_P.dtype)
        ratios_P2 = None if reference_P2 is None else policy_P2 - reference_P2
        result = self.loss(
            chosen_logprobs_P=chosen_P,
            rejected_logprobs_P=rejected_P,
            chosen_logratios_P=None if ratios_P2 is None else ratios_P2[:, 0],
            rejected_logratios_P=None if ratios_P2 is None else ratios_P2[:, 1],
            chosen_lengths_P=lengths_P2[:, 0],
            rejected_lengths_P=lengths_P2[:, 1],
        )
        if not isinstance(result, PreferenceLoss):
            rewards_P2 = (policy_P2 if ratios_P2 is None else ratios_P2).detach()
            result = PreferenceLoss(result, rewards_P2[:, 0], rewards_P2[:, 1])
        losses_P = result.losses_P
        _require_losses(self.loss, losses_P, len(chosen_P), "pairs")
        metrics = {
            "loss/preference": losses_P,
            **describe_rewards(result.chosen_rewards_P, result.rejected_rewards_P),
            "preference/chosen_logprob_nats/mean": chosen_P,
            "preference/rejected_logprob_nats/mean": rejected_P,
        }
        if self.sft_coefficient:
            metrics["loss/supervised_nats"] = -chosen_P / lengths_P2[:, 0]
            losses_P = losses_P + self.sft_coefficient * metrics["loss/supervised_nats"]
        return losses_P, {name: values_P.detach() for name, values_P in metrics.items()}


def loss_of_microbatch(
    microbatch: MicroBatch, values_S: Tensor, weights_S: Tensor, loss_of: PairLoss
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the global loss of pairs, to be *summed*, and its metrics.

    Ranks that share the tokens of a pair all compute its loss; each counts for its share of them.

    Args:
        microbatch: has both rows of a pair, or neither; a dummy one has a share of 0 with a
            gradient, and no metrics.
        weights_S: share of each token's *row* in the mean over all rows of the step.
    """
    rows = microbatch.rows
    sums_P2, weights_P2 = rows.sum(values_S).view(-1, 2), rows.mean(weights_S).view(-1, 2)
    lengths_P2 = rows.lengths_R.view(-1, 2)
    computed_P = (lengths_P2 > 0).all(dim=1).nonzero()[:, 0]
    if not len(computed_P):
        return sums_P2.sum() * 0.0, {}
    own_P2 = rows.row_T.bincount(minlength=len(rows.lengths_R)).view(-1, 2)
    shares_P = (own_P2.sum(dim=1) / lengths_P2.sum(dim=1))[computed_P]
    losses_P, values = loss_of(sums_P2[computed_P], lengths_P2[computed_P], computed_P)
    share = (losses_P * shares_P * weights_P2.sum(dim=1)[computed_P]).sum()
    return share, mean_over_pairs(values, shares_P)


def describe_rewards(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    """Return metrics of the rewards, or scores, of both answers, to average over pairs."""
    margins_P = chosen_P - rejected_P
    return {
        "preference/chosen_reward/mean": chosen_P,
        "preference/rejected_reward/mean": rejected_P,
        "preference/margin/mean": margins_P,
        "preference/accuracy": torch.heaviside(margins_P, margins_P.new_full((), 0.5)),
    }


def mean_over_pairs(values: Mapping[str, Tensor], shares_P: Tensor) -> Metrics:
    """Return metrics of pairs as means that merge; this rank counts for ``shares_P`` of each."""
    sums = [(values_P * shares_P).sum() for values_P in values.values()]
    *totals, count = torch.stack([*sums, shares_P.sum()]).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)}


def of_held_out(metrics: Metrics) -> Metrics:
    """Return metrics of pairs under the names of held-out ones."""
    return {
        "eval/preference_loss": metrics["loss/preference"],
        "eval/accuracy": metrics["preference/accuracy"],
        "eval/margin": metrics["preference/margin/mean"],
        "eval/chosen_reward": metrics["preference/chosen_reward/mean"],
        "eval/rejected_reward": metrics["preference/rejected_reward/mean"],
    }
