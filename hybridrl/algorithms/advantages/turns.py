"""Advantages of turns: the rewards from a turn on, against those of other conversations."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.response_tokens import Floats, ResponseTokens, Turns, sum_discounted
from hybridrl.algorithms.response_tokens import whiten as whiten_tokens
from hybridrl.batch import row_offsets
from hybridrl.config.limits import Discount, NotNegative, StdFloor


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

    The returns are those of ``gigpo``, which compares turns that began in the same state. Where
    each row has one turn, and where all have as many turns with a reward for the last one and
    ``gamma=1``, it is ``grpo``. The sum of normalised rewards of DeepSeekMath (arXiv:2402.03300,
    4.1.3) charges each further turn without a reward; this does not.

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


def gigpo(
    rewards_BL: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    token_ids_BL: Tensor,
    *,
    gamma: Discount = 0.95,
    step_weight: NotNegative = 1.0,
    scale: Literal["group", "none"] = "none",
) -> Tensor:
    """Compare conversations of a prompt, and turns that began in the same state (GiGPO).

    ``A[b, k] = grpo(sum_k r)[b] + step_weight * (G[b, k] - mean G)`` with the returns ``G`` of
    ``turn_grpo`` (arXiv:2505.10978, 4). The mean is over all turns of the group, also of one row,
    that answer the same observation, token by token: the last tool's or environment's answer, or
    the prompt. A turn that answers what no other does has no second term.

    Args:
        token_ids_BL: jagged int64. Observations with equal words and other images are alike.
        gamma: discount per turn, in [0, 1].
        scale: ``group`` divides either term by the std of those that it is compared with.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    turns = Turns.of(tokens)
    rewards_S = tokens.select(rewards_BL)
    returns_K = torch.from_numpy(_returns_of(turns, rewards_S, gamma)).double()
    peers = Groups.of(_states_of(turns, tokens, token_ids_BL, group_B))
    steps_K = peers.subtract(returns_K, peers.mean(returns_K), singletons="zero")
    if scale == "group":
        steps_K /= peers.std(returns_K).masked_fill(peers.sizes_B == 1, 1.0) + 1e-6
    row_K = torch.arange(len(group_B)).repeat_interleave(torch.from_numpy(turns.counts_B))
    of_turns_K = torch.from_numpy(turns.sum(rewards_S))
    rewards_B = torch.zeros(len(group_B)).index_add_(0, row_K, of_turns_K)
    rows_K = grpo(rewards_B, group_B, scale=scale).double()[row_K]
    return tokens.to_rows(turns.spread((rows_K + step_weight * steps_K).numpy()))


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


def _states_of(
    turns: Turns, tokens: ResponseTokens, token_ids_BL: Tensor, group_B: Tensor
) -> Tensor:
    """Number the turns by group and by the tokens since the turn before, int64 [K]."""
    positions_S = np.flatnonzero(tokens.mask_T)
    row_K = np.repeat(np.arange(len(turns.counts_B)), turns.counts_B)
    after_last_K = np.append(-1, positions_S)[turns.begins_K] + 1
    begins_K = np.maximum(after_last_K, row_offsets(token_ids_BL).numpy()[row_K])
    ends_K = positions_S[turns.begins_K]
    ids_T, groups = token_ids_BL.values().numpy(), group_B.tolist()
    numbers: dict[tuple[int, bytes], int] = {}
    states = [
        (groups[row], ids_T[begin:end].tobytes())
        for row, begin, end in zip(row_K, begins_K, ends_K, strict=True)
    ]
    return torch.tensor(
        [numbers.setdefault(state, len(numbers)) for state in states], dtype=torch.int64
    )
