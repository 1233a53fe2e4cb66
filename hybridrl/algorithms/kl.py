"""Distance to another policy, estimated from the sampled tokens alone, and what it costs.

Legend: B rows, L tokens of a row (jagged), T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths
from hybridrl.config.algorithm import KLConfig
from hybridrl.metrics import Mean, Metrics

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats before ``exp``: e^20 = 5e8 is far outside of every clip
range, and float32 stays finite. Past it no gradient flows."""

_HORIZON = 10_000
"""Responses over which an adaptive coefficient changes by a factor of 1.2 at most, as in verl."""

_MEASURED = {"loss": "policy/kl_to_reference_nats/mean", "reward": "reward/kl_nats/mean"}
"""The metric that a target is compared with, by the placement of the penalty."""

KLGradient = Literal["value", "k2", "ratio"]

Estimator = Callable[..., Tensor]
"""Takes ``logprobs_T`` and ``reference_logprobs_T`` by name; returns nats per token."""


def clamped_log_ratio(current_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return ``current - old`` nats, clamped to +-20: past it no gradient flows to the current."""
    log_ratio_T = current_logprobs_T - old_logprobs_T.detach()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return ``d = logprob - reference_logprob`` (http://joschu.net/blog/kl-approx.html).

    An unbiased estimate of KL(policy || reference) at a token that the policy sampled, of either
    sign: the plain choice in the reward. As a loss its gradient is 0 in expectation. float32 nats,
    of the arguments' shape.
    """
    return logprobs_T - reference_logprobs_T


def k2(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return ``d^2 / 2``: biased, of low variance, and as a loss with the gradient of the true KL.

    On-policy, that is (arXiv:2506.09477).
    """
    return (logprobs_T - reference_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return ``exp(-d) - 1 + d``: unbiased and never negative (arXiv:2402.03300, eq. 4).

    As a loss it has the gradient of KL(reference || policy). ``-d`` is clamped to +-20 nats; verl
    also clamps the value to 10, TRL clamps nothing.
    """
    opposite_T = (reference_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, since exp(x) - 1 of a small x keeps no digit of the x^2 / 2 that is wanted.
    return torch.expm1(opposite_T) - opposite_T


def absolute(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Return ``abs(d)``, biased."""
    return (logprobs_T - reference_logprobs_T).abs()


def kl_penalty(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    *,
    estimator: Estimator,
    gradient: KLGradient = "value",
) -> Tensor:
    """Estimate KL(policy || reference) per token as a loss, with a gradient of choice.

    ``value``: the estimate's own. ``k2``: that of k2 under the estimate's value, unbiased on-policy
    (verl's ``k1+`` and ``k3+``, a straight-through estimate). ``ratio``: of the estimate times
    ``exp(current - old)``, value and gradient. With k3 the gradient is ``ratio d``, that of the KL
    of the current policy from samples of the old one (arXiv:2512.02556; TRL's
    ``use_bias_correction_kl``, on by default there; slime's ``use-unbiased-kl``).

    Args:
        current_logprobs_T: float32 nats, with gradient.
        old_logprobs_T: float32 nats, of the policy that the samples stand for.
    """
    reference_T = reference_logprobs_T.detach()
    estimate_T = estimator(logprobs_T=current_logprobs_T, reference_logprobs_T=reference_T)
    if gradient == "k2":
        squares_T = k2(current_logprobs_T, reference_T)
        return squares_T - squares_T.detach() + estimate_T.detach()
    if gradient == "ratio":
        return clamped_log_ratio(current_logprobs_T, old_logprobs_T).exp() * estimate_T
    return estimate_T


def estimate_response_kl(
    old_logprobs_BL: Tensor,
    reference_logprobs_BL: Tensor,
    response_mask_BL: Tensor,
    *,
    estimator: Estimator,
) -> Tensor:
    """Estimate KL(policy || reference) at each response token, for a charge in the reward.

    Jagged float32 nats [B, L], without gradient, 0 where the mask is False.
    """
    kl_T = estimator(
        logprobs_T=old_logprobs_BL.values().detach(),
        reference_logprobs_T=reference_logprobs_BL.values(),
    )
    kl_T = torch.where(response_mask_BL.values(), kl_T, 0.0)
    return jagged_from(kl_T, row_lengths(response_mask_BL))


class KLCoefficient:
    """Holds the coefficient; part of a checkpoint where it adapts."""

    def __init__(self, config: KLConfig, *, num_rows: int) -> None:
        """Start at the configured coefficient; a step has ``num_rows`` responses."""
        self._config = config
        self._num_rows = num_rows
        self.value = config.coefficient
        """Weight of the penalty in the next step."""

    @property
    def in_loss(self) -> float:
        """Weight of the penalty in the policy loss; 0 if it is elsewhere."""
        return self.value if self._config.placement == "loss" else 0.0

    def restore(self, value: float | None) -> None:
        """Continue from the coefficient of a checkpoint; None begins with the configured one."""
        if value is None or self._config.target_nats is None:
            value = self._config.coefficient
        self.value = value

    def adapt(self, measured: Metrics) -> Metrics:
        """Raise it if the KL exceeds its target, else lower it (arXiv:1909.08593, 2.2).

        ``coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_rows / horizon)``, as in verl and
        OpenRLHF, where the KL is a mean per token. In the paper it is per sequence (unverified), so
        its targets are larger.

        Returns:
            The coefficient that the step used; nothing where it is fixed.
        """
        config, used = self._config, self.value
        if config.target_nats is None:
            return {}
        kl = measured.get(_MEASURED[config.placement])
        # A step that learned from no token measures none.
        if kl is not None and math.isfinite(kl.value):
            error = min(max(kl.value / config.target_nats - 1, -0.2), 0.2)
            self.value = used * (1 + error * self._num_rows / _HORIZON)
        return {"policy/kl_coefficient": Mean(used)}
