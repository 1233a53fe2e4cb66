"""Tokens that the policy's loss leaves out, whatever the loss. Denominators stay as they are.

A mask is bool [T], True to keep. It multiplies the policy's term only, not a KL penalty, as in TRL.

Legend: T packed response tokens of this rank.
"""

from __future__ import annotations

from torch import Tensor

from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.limits import LogRange, Share


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


def top_entropy_mask(
    entropy_T: Tensor,
    rows: TokenRows,
    *,
    fraction: Share = 0.2,
) -> Tensor:
    """Learn from the tokens of the highest entropy alone (arXiv:2506.01939).

    The threshold is a quantile of the micro-batch; TRL's (``top_entropy_quantile``) is one of the
    micro-batches of all ranks. A ``fraction`` of 1 keeps all.
    """
    entropy_T = entropy_T.detach()
    num_kept = 1 + int(fraction * max(rows.num_tokens - 1, 0))
    return entropy_T >= rows.kth_largest(entropy_T, num_kept)
