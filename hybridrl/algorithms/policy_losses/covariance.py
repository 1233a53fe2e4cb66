"""Losses that spare entropy: tokens whose log-prob and advantage covary most are held back.

The entropy falls by the covariance of log-probs and advantages, and few tokens carry most of it
(arXiv:2505.22617). Means, and the number of tokens to hold back, are those of the micro-batch, as
in verl: the loss depends on the division into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.kl import clamped_log_ratio
from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.policy_losses.ppo import clip_surrogate
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.limits import ClipHigh, ClipLow, Covariance, NotNegative, Share


def clip_cov(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    fraction: Share = 2e-4,
    covariance_low: Covariance = 1.0,
    covariance_high: Covariance = 5.0,
) -> PolicyLoss:
    """Drop a few random tokens of high covariance from PPO's surrogate (Clip-Cov).

    Candidates are tokens that the surrogate does not clip, with a covariance in an open interval.
    Of these ``max(1, int(fraction N))`` lose their loss. verl draws them from torch's global
    generator. Here a token's random number is a hash of its old log-prob and advantage: the choice
    is the same in a repeated run, on ranks that share a micro-batch, and in any order of tokens.

    Args:
        covariance_high: verl and the paper drop none above.
    """
    surrogate = clip_surrogate(
        clamped_log_ratio(current_logprobs_T, old_logprobs_T).exp(),
        advantages_T,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    covariance_T = _covariance(current_logprobs_T, advantages_T, rows)
    is_candidate_T = (covariance_T > covariance_low) & (covariance_T < covariance_high)
    is_candidate_T &= ~(surrogate.is_clipped_low_T | surrogate.is_clipped_high_T)
    draws_T = torch.where(is_candidate_T, _draw(old_logprobs_T, advantages_T), -1)
    is_dropped_T = is_candidate_T & (draws_T >= rows.largest(draws_T, _count(rows, fraction))[-1])
    return PolicyLoss(
        losses_T=surrogate.losses_T.masked_fill(is_dropped_T, 0.0),
        ratio_T=surrogate.ratio_T,
        is_clipped_low_T=surrogate.is_clipped_low_T,
        is_clipped_high_T=surrogate.is_clipped_high_T | is_dropped_T,
    )


def kl_cov(
    current_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    fraction: Share = 2e-4,
    coefficient: NotNegative = 0.1,
) -> Tensor:
    """Charge tokens of the highest covariance for leaving the old policy (KL-Cov).

    ``-ratio A`` without a clip, plus ``coefficient |current - old|`` at the
    ``max(1, int(fraction N))`` tokens of the highest covariance. The charge has no gradient in the
    first optimizer step of a rollout, where both policies agree. verl's configuration has 0.1, its
    code falls back to 1.

    Args:
        coefficient: advantage units per nat.
    """
    log_ratio_T = clamped_log_ratio(current_logprobs_T, old_logprobs_T)
    covariance_T = _covariance(current_logprobs_T, advantages_T, rows)
    is_charged_T = covariance_T >= rows.largest(covariance_T, _count(rows, fraction))[-1]
    charges_T = (coefficient * log_ratio_T.abs()).masked_fill(~is_charged_T, 0.0)
    return charges_T - log_ratio_T.exp() * advantages_T.detach()


def _covariance(current_logprobs_T: Tensor, advantages_T: Tensor, rows: TokenRows) -> Tensor:
    """Return each token's product of deviations from the means of the micro-batch."""
    logprobs_T, advantages_T = current_logprobs_T.detach(), advantages_T.detach()
    num_tokens = max(rows.num_tokens, 1)
    deviations_T = logprobs_T - rows.total(logprobs_T) / num_tokens
    return deviations_T * (advantages_T - rows.total(advantages_T) / num_tokens)


def _count(rows: TokenRows, fraction: float) -> int:
    return max(1, int(fraction * rows.num_tokens))


def _draw(old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Hash two float columns to random integers in [0, 2^31), int64."""
    bits_T, other_bits_T = (
        column_T.detach().float().contiguous().view(torch.int32).long()
        for column_T in (old_logprobs_T, advantages_T)
    )
    mixed_T = bits_T * 0x2545F4914F6CDD1D + other_bits_T * 0x5851F42D4C957F2D
    for _ in range(2):
        mixed_T = (mixed_T ^ (mixed_T >> 32)) * 0x5851F42D4C957F2D
    return (mixed_T >> 32) & 0x7FFFFFFF
