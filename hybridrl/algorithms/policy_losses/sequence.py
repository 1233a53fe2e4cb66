"""Losses whose ratio is that of a full response, on each of its tokens.

A token has the value of its response, and the gradient of its own log-prob. So the aggregation does
the mean over rows, and no gradient crosses ranks that share a response. With one advantage per
response, value and gradient are those of the papers' sum over responses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO, clamped_log_ratio
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.policy_losses.ppo import clip_surrogate
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.limits import ClipHigh, ClipLow, Exponent, LogRange

_LOG_SMALLEST = math.log(1e-8)


def gspo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    clip_low: ClipLow = 3e-4,
    clip_high: ClipHigh = 4e-4,
) -> PolicyLoss:
    """Clip the geometric mean of a response's ratios (GSPO, arXiv:2507.18071).

    ``s = exp(mean_t(current - old))``, then PPO's surrogate of ``s``. Aggregated by
    ``sequence_mean_token_mean`` it is the paper's; verl's default configuration takes token_mean,
    which weighs long responses more. By ``sequence_mean_token_sum`` it is LUSPO (arXiv:2602.05261,
    with ranges 2e-3 and 2.5e-3; TRL's ``luspo``). If the advantages of a response differ, it is
    the paper's GSPO-token.

    Args:
        clip_low: in (0, 1). Ratios of responses are near 1, so ranges are small.

    Returns:
        ``ratio_T`` is ``s``. ``log s`` is clamped to +-20 nats (verl: at most 10; TRL: never).
    """
    log_ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T)
    return _clip_rows(
        rows.mean(log_ratio_T.detach()),
        log_ratio_T,
        advantages_T,
        rows,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def rloo_clip(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> PolicyLoss:
    """Clip the ratio of full responses, the product over their tokens (TRL's RLOOTrainer).

    ``s = exp(sum_t(current - old))``, then PPO's surrogate of ``s`` (a response is one action,
    arXiv:2402.14740). Aggregate by ``sequence_mean_token_mean``: TRL's plain mean over rows.

    Args:
        advantages_T: float32, one number per response.

    Returns:
        ``ratio_T`` is ``s``. ``log s`` is clamped to +-20 nats (TRL: never).
    """
    log_ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T)
    return _clip_rows(
        rows.sum(log_ratio_T.detach()),
        log_ratio_T * rows.spread(rows.lengths_R.to(log_ratio_T.dtype)),
        advantages_T,
        rows,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def gmpo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    clip_low: LogRange = 0.4,
    clip_high: LogRange = 0.4,
) -> PolicyLoss:
    """Clip token by token, then take the geometric mean (GMPO, arXiv:2507.20673).

    ``loss = -A exp(mean_t q_t)``, where ``q = min(current - old, clip_high)`` if A is positive, and
    ``max(current - old, -clip_low)`` if it is negative. Ranges are in nats: 0.4 is the paper's and
    TRL's; verl takes its ``clip_ratio``, 0.2. Aggregate by ``sequence_mean_token_mean``; verl and
    TRL then also divide by rows without tokens. A weight of the sampler's correction multiplies its
    token; verl multiplies the response by their geometric mean.

    Args:
        advantages_T: float32, one number per response.
        clip_low: nats that a token of a bad response may fall.
        clip_high: nats that a token of a good response may rise.

    Returns:
        ``ratio_T`` is ``exp(mean_t q_t)``.
    """
    advantages_T = advantages_T.detach()
    log_ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T)
    below_T, above_T = log_ratio_T.clamp(min=-clip_low), log_ratio_T.clamp(max=clip_high)
    clipped_T = torch.where(advantages_T > 0, above_T, below_T)
    ratio_T = rows.spread(rows.mean(clipped_T.detach()).exp())
    log_ratio_T = log_ratio_T.detach()
    return PolicyLoss(
        losses_T=-advantages_T * ratio_T * _with_gradient_of(torch.ones_like(ratio_T), clipped_T),
        ratio_T=ratio_T,
        is_clipped_low_T=(log_ratio_T < -clip_low) & (advantages_T < 0),
        is_clipped_high_T=(log_ratio_T > clip_high) & (advantages_T > 0),
    )


def vespo(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    power_positive: Exponent = 2.0,
    decay_positive: Exponent = 3.0,
    power_negative: Exponent = 3.0,
    decay_negative: Exponent = 2.0,
) -> Tensor:
    """Weigh a response's log-probs by a soft window of its ratio (VESPO, arXiv:2602.10693, 3.4).

    ``-phi(W) A logprob`` with ``W = exp(sum_t(current - old))`` and the constant
    ``phi(W) = W^power exp(decay (1 - W))``, which is 1 at 1 and falls on both sides. Defaults are
    those of TRL, ``k`` and ``lambda`` there; 0 counts as a positive advantage. Aggregate by
    token_mean. TRL puts the sampler's token weights inside of W; ``old_logprobs=sampler`` does
    that without their truncation.

    Args:
        power_positive: of responses with an advantage of at least 0.
        decay_positive: of the same.
        power_negative: of responses with a negative advantage.
        decay_negative: of the same.
    """
    advantages_T = advantages_T.detach()
    log_ratio_T = clamped_log_ratio(current_logprobs_T.detach(), old_logprobs_T)
    log_weight_R = rows.sum(log_ratio_T).clamp(_LOG_SMALLEST, MAX_LOG_RATIO)
    decay_R = 1 - log_weight_R.exp()
    positive_R = (power_positive * log_weight_R + decay_positive * decay_R).exp()
    negative_R = (power_negative * log_weight_R + decay_negative * decay_R).exp()
    phi_T = torch.where(advantages_T >= 0, rows.spread(positive_R), rows.spread(negative_R))
    return -(phi_T * advantages_T) * current_logprobs_T


def _clip_rows(
    log_ratio_R: Tensor,
    gradient_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return PPO's surrogate of ``exp(log_ratio_R)``, with the gradient of another log-ratio."""
    ratio_R = log_ratio_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio_T = rows.spread(ratio_R) * _with_gradient_of(torch.ones_like(gradient_T), gradient_T)
    return clip_surrogate(ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high)


def _with_gradient_of(values_T: Tensor, source_T: Tensor) -> Tensor:
    """Return the values of one tensor, detached, with the gradient of another of its shape."""
    return values_T.detach() + (source_T - source_T.detach())
