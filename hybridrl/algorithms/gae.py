"""Generalized advantage estimation: how much better a response did, token by token, than expected.

Legend: B rows, L tokens of a row (jagged), S response tokens of all rows, N of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridrl.batch import jagged_from, row_lengths, row_offsets


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """What the policy and the critic learn from; both columns are 0 where the mask is False."""

    advantages_BL: Tensor  # float32 reward units, jagged
    returns_BL: Tensor  # float32 reward units, jagged, what each value should have been


def generalized_advantages(
    rewards_BL: Tensor,
    *,
    values_BL: Tensor,
    response_mask_BL: Tensor,
    gamma: float,
    lam: float,
) -> AdvantageEstimate:
    """Weigh what came after each token against what the critic expected before it.

    Over the n response tokens of a row, others left out, with ``V[n] = 0``
    (arXiv:1506.02438, eq. 16): ``delta[t] = r[t] + gamma * V[t+1] - V[t]`` and
    ``A[t] = delta[t] + gamma * lam * A[t+1]``. The returns are ``A[t] + V[t]``.

    ``V[n] = 0`` holds for a truncated response too: nothing is bootstrapped from its last token.
    The length limit is part of the task, the same in training and in evaluation, and the truncated
    response has its final reward; what a longer one would have earned is not what is optimised
    (arXiv:1712.00378, 2). A critic sees positions, so it can learn how near the end is.

    Args:
        rewards_BL: jagged float32, earned by choosing the token.
        values_BL: jagged float32 reward units, the critic's value of the state *before* the token.
        response_mask_BL: jagged bool; a row may have none, and gaps (the answers of tools).
        gamma: discount per token, in [0, 1].
        lam: in [0, 1]. 1 is the rewards to come minus the value, 0 is ``delta``.

    Returns:
        Advantages and returns, without gradient.
    """
    mask_T = response_mask_BL.values()
    index_S = mask_T.nonzero()[:, 0]
    edges = torch.searchsorted(index_S, row_offsets(response_mask_BL))  # of rows, among S
    lengths_B = edges.diff()
    values_S = values_BL.values().detach().float().index_select(0, index_S)
    deltas_S = rewards_BL.values().detach().float().index_select(0, index_S) - values_S
    next_values_S = values_S.roll(-1)
    next_values_S[edges[1:][lengths_B > 0] - 1] = 0.0
    deltas_S.add_(next_values_S, alpha=gamma)
    advantages_S = _sum_discounted(deltas_S, lengths_B, discount=gamma * lam)

    def to_rows(column_S: Tensor) -> Tensor:
        column_T = torch.zeros(mask_T.shape).masked_scatter_(mask_T, column_S)
        return jagged_from(column_T, row_lengths(response_mask_BL))

    return AdvantageEstimate(to_rows(advantages_S), to_rows(advantages_S + values_S))


def whiten(values_BL: Tensor, response_mask_BL: Tensor) -> Tensor:
    """Shift and scale response tokens to mean 0 and standard deviation 1 over the whole batch.

    Args:
        values_BL: jagged float32.
        response_mask_BL: jagged bool.

    Returns:
        Jagged float32 [B, L], 0 where the mask is False. Equal values give exact zeros.
    """
    mask_T, values_T = response_mask_BL.values(), values_BL.values().float()
    num_tokens = int(mask_T.sum())
    mean = torch.where(mask_T, values_T, 0.0).sum(dtype=torch.float64) / max(num_tokens, 1)
    white_T = torch.where(mask_T, values_T - mean.float(), 0.0)
    first = values_T[mask_T.int().argmax()] if num_tokens else mean
    if bool((mask_T & (values_T != first)).any()):
        white_T /= white_T.norm() / (num_tokens - 1) ** 0.5 + 1e-8
    else:
        white_T.zero_()  # rounding over the std of rounding would not be 0
    return jagged_from(white_T, row_lengths(response_mask_BL))


def _sum_discounted(values_S: Tensor, lengths_B: Tensor, *, discount: float) -> Tensor:
    """Return ``y[t] = x[t] + discount * y[t+1]`` within each row, float32 [S].

    Time first, so that each position of all rows is one operation on contiguous memory. Short rows
    are filled with zeros at their ends, which the recurrence leaves 0.
    """
    lengths = lengths_B.tolist()
    padded_BN = pad_sequence(list(torch.split(values_S, lengths)), batch_first=True)
    sums_NB = padded_BN.t().contiguous()
    by_position = sums_NB.unbind(0)
    for now, later in zip(by_position[-2::-1], by_position[:0:-1], strict=True):
        now.add_(later, alpha=discount)
    rows = sums_NB.t().contiguous().unbind(0)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
