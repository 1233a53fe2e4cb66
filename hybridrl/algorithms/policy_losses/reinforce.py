"""Losses that weigh each log-prob with a constant: no range cuts their gradient."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO, clamped_log_ratio
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.limits import ClipHigh, GateTemperature, NotNegative, RatioCap


def reinforce(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    ratio: Literal["none", "token", "sequence"] = "none",
    ratio_low: NotNegative = 0.0,
    ratio_high: RatioCap = 2.0,
) -> PolicyLoss:
    """Return ``-A logprob`` per token (Williams 1992); also the loss of GPG (arXiv:2504.02546).

    With a ratio the loss is multiplied by the constant ``exp(current - old)`` of the token, or of
    the response (the product over its tokens), truncated at ``ratio_high``. A ``ratio_low`` above 0
    gives weight 0 outside of the range instead. With the sampler's log-probs as the old ones these
    are verl's presets ``bypass_pg_is`` (sequence) and ``bypass_pg_token_icepop`` (token, 0.5 to 5).

    Args:
        ratio: that weighs a token; ``none`` is on-policy.
        ratio_low: smallest ratio that has a weight.

    Returns:
        ``ratio_T`` is that of the token, or of its response.
    """
    log_ratio_T = clamped_log_ratio(current_logprobs_T.detach(), old_logprobs_T)
    if ratio == "sequence":
        log_ratio_T = rows.spread(rows.sum(log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    ratio_T = log_ratio_T.exp()
    weights_T = advantages_T.detach()
    is_low_T, is_high_T = ratio_T < ratio_low, ratio_T > ratio_high
    if ratio == "none":
        is_low_T, is_high_T = torch.zeros_like(is_low_T), torch.zeros_like(is_high_T)
    else:
        weights_T = weights_T * ratio_T.clamp(max=ratio_high)
        if ratio_low:
            weights_T = weights_T.masked_fill(is_low_T | is_high_T, 0.0)
    return PolicyLoss(-weights_T * current_logprobs_T, ratio_T, is_low_T, is_high_T)


def topr(
    current_logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, rows: TokenRows
) -> PolicyLoss:
    """Taper bad responses that the policy already avoids (TOPR, arXiv:2503.14286).

    ``-A logprob`` for good responses, as in supervised learning; for bad ones times the constant
    ``min(1, exp(sum_t(current - old)))``, so that a response that became unlikely is not pushed
    further. Meant for data of another policy: take the sampler's log-probs as the old ones.
    Trinity-RFT tapers by the same rule. The paper's A is the reward, in [-1, 1].

    Args:
        advantages_T: float32, one number per response; 0 has no loss.

    Returns:
        ``ratio_T`` is that of the response.
    """
    advantages_T = advantages_T.detach()
    log_ratio_R = rows.sum(clamped_log_ratio(current_logprobs_T.detach(), old_logprobs_T))
    ratio_T = rows.spread(log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
    is_bad_T = advantages_T < 0
    weights_T = torch.where(is_bad_T, ratio_T.clamp(max=1.0), 1.0) * advantages_T
    return PolicyLoss(
        losses_T=-weights_T * current_logprobs_T,
        ratio_T=ratio_T,
        is_clipped_low_T=torch.zeros_like(is_bad_T),
        is_clipped_high_T=is_bad_T & (ratio_T > 1.0),
    )


def cispo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: Annotated[float, Field(gt=0.0, le=1.0, examples=[1.0], description="1 is off")] = 1.0,
    clip_high: ClipHigh = 4.0,
) -> PolicyLoss:
    """Bound the weight of a token instead of dropping it (CISPO, arXiv:2506.13585, eq. 4-5).

    ``-clip(ratio, 1 - clip_low, 1 + clip_high) A logprob``, the clipped ratio a constant. Defaults
    are those of ScaleRL (arXiv:2510.13786) and of TRL's manual, a cap of 5 without a floor: TRL
    writes ``epsilon_high=5``. verl's defaults, 0.2 and 0.2, bound both sides.

    Args:
        clip_low: in (0, 1]; 1 is off.
    """
    ratio_T = clamped_log_ratio(current_logprobs_T.detach(), old_logprobs_T).exp()
    weights_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T.detach()
    return PolicyLoss(
        losses_T=-weights_T * current_logprobs_T,
        ratio_T=ratio_T,
        is_clipped_low_T=ratio_T < 1 - clip_low,
        is_clipped_high_T=ratio_T > 1 + clip_high,
    )


def dro(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    penalty: NotNegative = 1.0,
) -> Tensor:
    """Pull the log-ratio towards ``A / penalty`` by a square (DRO, arXiv:2405.19107, unverified).

    ``-(A logprob - penalty / 2 (current - old)^2)``, whose gradient is
    ``-(A - penalty (current - old))`` times that of the log-prob. verl has no default for its
    ``dro_beta``. The paper's A is reward minus a learned value; for data of another policy take
    the sampler's log-probs as the old ones.

    Args:
        penalty: reward units per nat, >= 0.
    """
    log_ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T)
    return penalty / 2 * log_ratio_T.square() - advantages_T.detach() * current_logprobs_T


def sapo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    temperature_positive: GateTemperature = 1.0,
    temperature_negative: GateTemperature = 1.05,
) -> Tensor:
    """Fade a token out as its ratio leaves 1, instead of cutting it (SAPO, arXiv:2511.20347).

    ``-A (4 / tau) sigmoid(tau (ratio - 1))``, with a temperature ``tau`` for each sign of A; 0
    counts as negative. At ratio 1 the gradient is REINFORCE's, and the value ``-2 A / tau``: losses
    do not compare with PPO's. Aggregate by ``sequence_mean_token_mean``: verl always does, whatever
    is configured.

    Args:
        temperature_positive: the larger, the narrower.
        temperature_negative: of tokens with a negative advantage.
    """
    advantages_T = advantages_T.detach()
    ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T).exp()
    tau_T = torch.where(advantages_T > 0, temperature_positive, temperature_negative)
    return -(4 * advantages_T / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1))
