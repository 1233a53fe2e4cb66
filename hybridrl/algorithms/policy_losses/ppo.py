"""PPO's loss, token by token: the ratio is clipped here (``clip_surrogate``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridrl.algorithms.kl import clamped_log_ratio
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.config.limits import ClipHigh, ClipLow, DualClip


def ppo_clip(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 0.0,
    two_sided: bool = False,
) -> PolicyLoss:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` per token.

    ``ratio = exp(current - old)``. With equal ranges it is PPO's (arXiv:1707.06347, eq. 7);
    ``clip_high > clip_low`` is clip-higher (arXiv:2503.14476, 3.1): unlikely tokens may grow.

    Dual clip (arXiv:1912.09729) bounds the loss of a bad token that became far more likely:
    ``min(loss, -A * dual_clip)`` where ``A < 0``. In verl it is always on with 3; here, in TRL and
    in OpenRLHF it is off by default. TRL's ``delta`` replaces the free ratio by
    ``min(ratio, delta)`` for both signs of A (arXiv:2505.07291, 4.1). That is the same for a bound
    above ``1 + clip_high``; below it ``two_sided`` gives TRL's numbers.

    Args:
        old_logprobs_T: float32 nats; the detached current ones make every ratio 1, and the gradient
            that of REINFORCE.
        dual_clip: bound of the ratio of bad tokens, above 1; 0 is off.
        two_sided: the bound is TRL's ``delta``.

    Raises:
        ValueError: a dual clip in (0, 1], which would cut the gradient of tokens that never moved.
    """
    return clip_surrogate(
        clamped_log_ratio(current_logprobs_T, old_logprobs_T).exp(),
        advantages_T,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        two_sided=two_sided,
    )


def clip_surrogate(
    ratio_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    two_sided: bool = False,
) -> PolicyLoss:
    """Return PPO's surrogate of any ratio; see ``ppo_clip``."""
    if 0.0 < dual_clip <= 1.0:
        raise ValueError(
            f"dual_clip={dual_clip} would cut the gradient of tokens whose ratio is still 1; "
            "set it above 1 (verl: 3), or to 0, which is off"
        )
    advantages_T = advantages_T.detach()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    bound = dual_clip or math.inf
    free_T = ratio_T.clamp(max=bound) if two_sided else ratio_T
    losses_T = -torch.minimum(free_T * advantages_T, clipped_T * advantages_T)
    if dual_clip and not two_sided:
        bounded_T = torch.minimum(losses_T, -advantages_T * dual_clip)
        losses_T = torch.where(advantages_T < 0, bounded_T, losses_T)
    ratio_T = ratio_T.detach()
    top = 1 + clip_high
    top_of_good, top_of_bad = (min(top, bound), max(top, bound)) if two_sided else (top, bound)
    is_above_T = (ratio_T > top_of_good) & (advantages_T > 0)
    if dual_clip:
        is_above_T |= (ratio_T > top_of_bad) & (advantages_T < 0)
    return PolicyLoss(
        losses_T=losses_T,
        ratio_T=ratio_T,
        is_clipped_low_T=(ratio_T < 1 - clip_low) & (advantages_T < 0),
        is_clipped_high_T=is_above_T,
    )
