"""Generalized advantage estimation: how much better a response did, token by token, than expected.

Legend: B rows, L tokens of a row (jagged), T = sum of L, S response tokens of all rows, C chunks of
K tokens. Columns are on the host; numpy selects by masks two to five times as fast as torch there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths, row_offsets

_CHUNK_TOKENS = 64

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """The targets of policy and critic; both columns are 0 where the mask is False."""

    advantages_BL: Tensor  # float32 reward units, jagged
    returns_BL: Tensor  # float32 reward units, jagged, target of each value


def generalized_advantages(
    rewards_BL: Tensor,
    *,
    values_BL: Tensor,
    response_mask_BL: Tensor,
    gamma: float,
    lam: float,
) -> AdvantageEstimate:
    """Compare the rewards after each token with the critic's value before it.

    Over the n response tokens of a row, others left out, with ``V[n] = 0``
    (arXiv:1506.02438, eq. 16): ``delta[t] = r[t] + gamma * V[t+1] - V[t]`` and
    ``A[t] = delta[t] + gamma * lam * A[t+1]``. The returns are ``A[t] + V[t]``.

    ``V[n] = 0`` holds for a truncated response too: nothing is bootstrapped from its last token.
    The length limit is part of the task, the same in training and in evaluation, and the truncated
    response has its final reward. The reward of a longer response is not the objective
    (arXiv:1712.00378, 2). A critic sees positions, so it can learn the distance to the end.

    Args:
        rewards_BL: jagged float32, earned by choosing the token.
        values_BL: jagged float32 reward units, the critic's value of the state *before* the token.
        response_mask_BL: jagged bool; a row may have none, and gaps (the answers of tools).
        gamma: discount per token, in [0, 1].
        lam: in [0, 1]. 1 is the rewards to come minus the value, 0 is ``delta``.

    Returns:
        Advantages and returns, without gradient.
    """
    mask_T = response_mask_BL.values().numpy()
    edges = row_offsets(response_mask_BL).tolist()
    counts = [np.count_nonzero(mask_T[begin:end]) for begin, end in pairwise(edges)]
    lengths_B = np.array(counts, dtype=np.int64)
    values_S = values_BL.values().detach().float().numpy()[mask_T]
    deltas_S = rewards_BL.values().detach().float().numpy()[mask_T]
    deltas_S -= values_S
    deltas_S += np.float32(gamma) * _following(values_S, lengths_B)
    advantages_S = _sum_discounted(deltas_S, lengths_B, discount=gamma * lam)

    def to_rows(column_S: Floats) -> Tensor:
        column_T = np.zeros(mask_T.shape, np.float32)
        column_T[mask_T] = column_S
        return jagged_from(torch.from_numpy(column_T), row_lengths(response_mask_BL))

    return AdvantageEstimate(to_rows(advantages_S), to_rows(advantages_S + values_S))


def whiten(values_BL: Tensor, response_mask_BL: Tensor) -> Tensor:
    """Shift and scale response tokens to mean 0 and standard deviation 1 over the full batch.

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


def _sum_discounted(values_S: Floats, lengths_B: Integers, *, discount: float) -> Floats:
    """Return ``y[t] = x[t] + discount * y[t+1]`` within each row, float32 [S].

    Rows are cut into chunks, and the last chunk of a row is filled with zeros. One loop over the
    positions of a chunk computes all chunks. Then each chunk adds the sums after it. Sums from the
    beginnings of chunks to the end of the row obey the same recurrence with ``discount ** K``.
    """
    chunks_B = -(-lengths_B // _CHUNK_TOKENS)
    runs = np.stack([lengths_B, chunks_B * _CHUNK_TOKENS - lengths_B], axis=1).ravel()
    is_token = np.repeat(np.tile([True, False], len(lengths_B)), runs)
    padded_CK = torch.zeros(int(chunks_B.sum()), _CHUNK_TOKENS)
    padded: Floats = padded_CK.view(-1).numpy()
    padded[is_token] = values_S
    sums_KC = padded_CK.t().contiguous()  # each position of all chunks is contiguous
    by_position = sums_KC.unbind(0)
    for now_C, next_C in zip(by_position[-2::-1], by_position[:0:-1], strict=True):
        now_C.add_(next_C, alpha=discount)
    if chunks_B.max(initial=0) > 1:
        whole_discount = discount**_CHUNK_TOKENS
        tails_C = _sum_discounted(sums_KC[0].numpy(), chunks_B, discount=whole_discount)
        following_C = torch.from_numpy(_following(tails_C, chunks_B))
        for position, sums_C in enumerate(by_position):
            sums_C.add_(following_C, alpha=discount ** (_CHUNK_TOKENS - position))
    padded_CK.copy_(sums_KC.t())
    sums_S: Floats = padded[is_token]
    return sums_S


def _following(values_S: Floats, lengths_B: Integers) -> Floats:
    """Return the next value of the same row, 0 after the last one."""
    following_S = np.zeros_like(values_S)
    following_S[:-1] = values_S[1:]
    following_S[(lengths_B.cumsum() - 1)[lengths_B > 0]] = 0.0
    return following_S
