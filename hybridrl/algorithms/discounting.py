"""Discounted sums within rows of response tokens.

Legend: B rows, S response tokens of all rows, C chunks of K tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from hybridrl.algorithms.response_tokens import Floats, Integers

_CHUNK_TOKENS = 64


def sum_discounted(values_S: Floats, lengths_B: Integers, *, discount: float) -> Floats:
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
        tails_C = sum_discounted(sums_KC[0].numpy(), chunks_B, discount=whole_discount)
        following_C = torch.from_numpy(next_values(tails_C, chunks_B))
        for position, sums_C in enumerate(by_position):
            sums_C.add_(following_C, alpha=discount ** (_CHUNK_TOKENS - position))
    padded_CK.copy_(sums_KC.t())
    sums_S: Floats = padded[is_token]
    return sums_S


def next_values(values_S: Floats, lengths_B: Integers) -> Floats:
    """Return the next value of the same row, 0 after the last one."""
    following_S = np.zeros_like(values_S)
    following_S[:-1] = values_S[1:]
    following_S[(lengths_B.cumsum() - 1)[lengths_B > 0]] = 0.0
    return following_S
