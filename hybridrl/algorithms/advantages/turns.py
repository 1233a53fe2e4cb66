"""Advantages of turns: the rewards from a turn on, against those of other conversations."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.response_tokens import Floats, ResponseTokens, Turns, sum_discounted
from hybridrl.algorithms.response_tokens import whiten as whiten_tokens
from hybridrl.config.limits import Discount, StdFloor


def turn_grpo(
    rewards_BL: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    *,
    gamma: Discount = 1.0,
    scale: Literal["group", "none"] = "group",
    std_floor: StdFloor = 1e-6,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Compare the return of each turn with that of the same turn in the group's other rows.

    ``G[b, k] = r[b, k] + gamma * G[b, k+1]``, where ``r`` adds the rewards of a turn's tokens, and
    ``A[b, k] = (G[b, k] - mean_{g, k} G) / (std_g + std_floor)``. The mean is over the rows of the
    group that have a turn ``k``; ``std_g`` is that of all the group's returns around these means,
    ``sqrt(sum (G - mean_{g, k} G)^2 / (turns - means))``.

    The returns are those of GiGPO (arXiv:2505.10978, its step level), which compares turns that
    began in the same state; here it is the turn's number. Where each row has one turn, and where
    all have as many turns with a reward for the last one and ``gamma=1``, it is ``grpo``. The sum
    of normalised rewards of DeepSeekMath (arXiv:2402.03300, 4.1.3) charges each further turn
    without a reward; this does not.

    Args:
        gamma: discount per turn, in [0, 1].
        singletons: of a turn that no other row of the group reaches; ``reward`` keeps its return.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    turns = Turns.of(tokens)
    returns_K = torch.from_numpy(_returns_of(turns, tokens.select(rewards_BL), gamma)).double()
    group_K = Groups.of(group_B).index_B.repeat_interleave(torch.from_numpy(turns.counts_B))
    index_K = turns.index_in_row()
    peers = Groups.of(group_K * (int(index_K.max()) + 1 if len(index_K) else 1) + index_K)
    centered_K = returns_K - peers.mean(returns_K)
    advantages_K = peers.subtract(returns_K, peers.mean(returns_K), singletons=singletons)
    if scale == "group":
        groups = Groups.of(group_K)
        num_means_K = groups.sum(1.0 / peers.sizes_B).round()
        freedom_K = (groups.sizes_B - num_means_K).clamp(min=1)
        std_K = (groups.sum(centered_K.square()) / freedom_K).sqrt()
        advantages_K /= std_K.masked_fill(peers.sizes_B == 1, 1.0) + std_floor
    return tokens.to_rows(turns.spread(advantages_K.numpy()))


def turn_reinforce(
    rewards_BL: Tensor, response_mask_BL: Tensor, *, gamma: Discount = 1.0, whiten: bool = True
) -> Tensor:
    """Give each turn its return, ``G[k] = r[k] + gamma * G[k+1]``, whitened over all tokens.

    ``reinforce_plus_plus`` (arXiv:2501.03262) with a discount per turn instead of per token.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    turns = Turns.of(tokens)
    returns_S = turns.spread(_returns_of(turns, tokens.select(rewards_BL), gamma))
    return tokens.to_rows(whiten_tokens(returns_S) if whiten else returns_S)


def _returns_of(turns: Turns, rewards_S: Floats, gamma: float) -> Floats:
    """Return the discounted rewards from each turn on, float32 [K]."""
    return sum_discounted(turns.sum(rewards_S), turns.counts_B.astype(np.int64), discount=gamma)
