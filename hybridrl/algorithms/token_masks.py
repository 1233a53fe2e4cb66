"""Tokens that the policy's loss leaves out, whatever the loss. Denominators stay as they are.

A mask is bool [T], True to keep. It multiplies the policy's term only, not a KL penalty, as in TRL.

Legend: T packed response tokens of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.limits import LogRange, Share

_SMALLEST = 1e-6  # probabilities are kept this far from 0 and 1, as in the authors' code


def off_policy_mask(
    current_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    max_nats: LogRange = 1e-2,
) -> Tensor:
    """Leave out bad responses that the policy has left behind (arXiv:2512.02556, eq. 9).

    Keep where ``A >= 0 or mean_t(sampler - current) <= max_nats``. TRL compares with the sampler
    (``off_policy_mask_threshold``), slime with the old policy (``use-opsm``, 1e-4). The paper
    gives no number.

    Args:
        sampler_logprobs_T: float32 nats; the old ones for slime's mask.
        advantages_T: float32, one number per response.
        max_nats: mean distance per token, > 0.
    """
    distance_R = rows.mean(sampler_logprobs_T.detach() - current_logprobs_T.detach())
    return (advantages_T >= 0) | rows.spread(distance_R <= max_nats)


def top_entropy_mask(entropy_T: Tensor, rows: TokenRows, *, fraction: Share = 0.2) -> Tensor:
    """Learn from the tokens of the highest entropy alone (arXiv:2506.01939).

    The threshold is a quantile of the micro-batch; TRL's (``top_entropy_quantile``) is one of the
    micro-batches of all ranks. A ``fraction`` of 1 keeps all.
    """
    entropy_T = entropy_T.detach()
    num_kept = 1 + int(fraction * max(rows.num_tokens - 1, 0))
    return entropy_T >= rows.largest(entropy_T, num_kept)[-1]


def binary_kl_mask(
    current_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    rows: TokenRows,
    *,
    max_nats: LogRange = 3e-3,
) -> Tensor:
    """Leave out responses on which policy and sampler differ (FlashREINFORCE, Hu et al. 2026).

    Keep where ``mean_t KL(p, q) <= max_nats``: the KL divergence of two outcomes, this token or
    another, of which the sampler gave it the probability ``p`` and the policy gives it ``q``. It is
    never negative, so tokens that rose do not hide tokens that fell. 3e-3 is the paper's.
    """
    p_T, q_T = (
        logprobs_T.detach().exp().clamp(_SMALLEST, 1 - _SMALLEST)
        for logprobs_T in (sampler_logprobs_T, current_logprobs_T)
    )
    kl_T = p_T * (p_T / q_T).log() + (1 - p_T) * (torch.log1p(-p_T) - torch.log1p(-q_T))
    return rows.spread(rows.mean(kl_T) <= max_nats)


def second_moment_mask(
    current_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    rows: TokenRows,
    *,
    max_square: LogRange = 0.04,
) -> Tensor:
    """Leave out outliers until the log-ratio's second moment is small (M2PO, arXiv:2510.01161).

    Of tokens that PPO's clip could cut (``A (current - sampler) > 0``) those with the largest
    squares go, until ``mean (current - sampler)^2 <= max_square`` (Algorithm 1). So stale tokens
    stay as long as few are far away. The mean is over a micro-batch; the paper's, over a batch.

    Args:
        advantages_T: float32; a token with 0 is kept.
        max_square: nats squared; 0.04 is the paper's, whatever the model and the staleness.
    """
    moved_T = (current_logprobs_T - sampler_logprobs_T).detach()
    is_bound_T = advantages_T * moved_T > 0
    squares_T = torch.where(is_bound_T, moved_T.square(), -1.0)
    smallest_first_N = rows.largest(squares_T, rows.num_tokens).flip(0)
    smallest_first_N = smallest_first_N[smallest_first_N > 0]
    counts_N = torch.arange(1, len(smallest_first_N) + 1, device=moved_T.device)
    # The mean of the n smallest grows with n, so what fits is a beginning.
    num_kept = int((smallest_first_N.cumsum(0) <= max_square * counts_N).sum())
    left_out_N = smallest_first_N[num_kept:]
    return squares_T < (left_out_N[0] if len(left_out_N) else torch.inf)
