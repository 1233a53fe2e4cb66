"""DPPO: a token is dropped if its probability moved too far, not if its ratio did.

A ratio of an unlikely token is noisy, and its clip strict; one of a likely token hardly leaves the
range. The divergence of the two outcomes, this token or another, treats both alike
(arXiv:2602.04879). Kept tokens have the loss of CISPO with a cap. The paper compares with the
policy that sampled (unverified): take the sampler's log-probs as the old ones for that.
"""

from __future__ import annotations

from torch import Tensor

from hybridrl.algorithms.kl import clamped_log_ratio
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.config.limits import LogRange, Probability, RatioCap

_EPSILON = 1e-8


def dppo_tv(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    max_fall: Probability = 0.2,
    max_rise: Probability = 0.2,
    ratio_cap: RatioCap = 20.0,
) -> PolicyLoss:
    """Drop good tokens whose probability rose too far, and bad ones that fell too far.

    Keep if ``p - p_old <= max_rise`` where A is positive, else if ``p - p_old >= -max_fall``: the
    total variation of two outcomes. The loss is ``-min(ratio, ratio_cap) A logprob``, the ratio a
    constant. verl reads bounds from ``clip_ratio_low`` and ``_high`` and the cap from
    ``clip_ratio_c``, 3 in its configuration; the paper wants it large (5.4).

    Args:
        ratio_cap: largest weight, >= 1.
    """
    rise_T = current_logprobs_T.detach().exp() - old_logprobs_T.detach().exp()
    return _drop(
        current_logprobs_T,
        old_logprobs_T,
        advantages_T,
        is_high_T=rise_T > max_rise,
        is_low_T=rise_T < -max_fall,
        ratio_cap=ratio_cap,
    )


def dppo_kl(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    max_fall: LogRange = 0.2,
    max_rise: LogRange = 0.2,
    ratio_cap: RatioCap = 20.0,
) -> PolicyLoss:
    """Do the same as ``dppo_tv`` with the KL divergence of two outcomes.

    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``, with 1e-8 added to both
    numbers of the second logarithm, as in verl.

    Args:
        max_fall: nats, of a token that is less likely now.
        max_rise: nats, of a token that is more likely now.
    """
    current_T, old_T = current_logprobs_T.detach(), old_logprobs_T.detach()
    other_T, old_other_T = 1 + _EPSILON - current_T.exp(), 1 + _EPSILON - old_T.exp()
    of_token_T = old_T.exp() * (old_T - current_T)
    kl_T = of_token_T + (old_other_T - _EPSILON) * (old_other_T / other_T).log()
    return _drop(
        current_logprobs_T,
        old_logprobs_T,
        advantages_T,
        is_high_T=(kl_T > max_rise) & (current_T > old_T),
        is_low_T=(kl_T > max_fall) & (current_T < old_T),
        ratio_cap=ratio_cap,
    )


def _drop(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    is_high_T: Tensor,
    is_low_T: Tensor,
    ratio_cap: float,
) -> PolicyLoss:
    advantages_T = advantages_T.detach()
    ratio_T = clamped_log_ratio(current_logprobs_T.detach(), old_logprobs_T).exp()
    is_good_T = advantages_T > 0
    is_clipped_low_T, is_clipped_high_T = is_low_T & ~is_good_T, is_high_T & is_good_T
    weights_T = ratio_T.clamp(max=ratio_cap) * advantages_T
    weights_T = weights_T.masked_fill(is_clipped_low_T | is_clipped_high_T, 0.0)
    return PolicyLoss(
        losses_T=-weights_T * current_logprobs_T,
        ratio_T=ratio_T,
        is_clipped_low_T=is_clipped_low_T,
        is_clipped_high_T=is_clipped_high_T,
    )
