"""The clipped surrogate of PPO, token by token. Legend: T packed response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """Losses to be weighted and summed, with the effect of the clip on each token."""

    losses_T: Tensor  # float32, with gradient
    ratio_T: Tensor  # float32, detached, current over old probability
    is_clipped_low_T: Tensor  # bool, the policy already avoids this bad token enough: no gradient
    is_clipped_high_T: Tensor  # bool, it already favours this good token enough: no gradient


def clipped_surrogate(
    current_logprobs_T: Tensor,
    *,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> ClippedSurrogate:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` per token.

    ``ratio = exp(current - old)``. With equal ranges it is PPO's (arXiv:1707.06347, eq. 7);
    ``clip_high > clip_low`` is clip-higher (arXiv:2503.14476, 3.1): unlikely tokens may grow.

    Args:
        current_logprobs_T: float32 nats, with gradient.
        old_logprobs_T: float32 nats; the detached current ones make every ratio 1, and the gradient
            that of REINFORCE.
        advantages_T: float32.
        clip_low: in (0, 1).
        clip_high: > 0.
    """
    log_ratio_T = (current_logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    ratio_T = ratio_T.detach()
    return ClippedSurrogate(
        losses_T=losses_T,
        ratio_T=ratio_T,
        is_clipped_low_T=(ratio_T < 1 - clip_low) & (advantages_T < 0),
        is_clipped_high_T=(ratio_T > 1 + clip_high) & (advantages_T > 0),
    )
