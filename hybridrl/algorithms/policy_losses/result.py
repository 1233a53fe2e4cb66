"""The result of a policy loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses to be weighted and summed, with the effect of the clip on each token.

    A loss without a range of its ratio may return ``losses_T`` alone.
    """

    losses_T: Tensor  # float32, with gradient
    ratio_T: Tensor  # float32, detached, current over old probability, of the token or its response
    is_clipped_low_T: Tensor  # bool, the ratio is below its range: the gradient is cut or bounded
    is_clipped_high_T: Tensor  # bool, the ratio is above its range: the same


def clamped_log_ratio(current_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return ``current - old`` nats, clamped to +-20: past it no gradient flows to the current."""
    log_ratio_T = current_logprobs_T - old_logprobs_T.detach()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_gradient_of(values_T: Tensor, source_T: Tensor) -> Tensor:
    """Return the values of one tensor, detached, with the gradient of another of its shape."""
    return values_T.detach() + (source_T - source_T.detach())
