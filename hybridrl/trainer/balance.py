"""Balance of rows over data-parallel ranks. Legend: B rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hybridrl.errors import DispatchError


def balance_over_ranks(
    lengths_B: Sequence[int], *, dp_size: int, num_minibatches: int
) -> list[int]:
    """Order rows so that all ranks get equally many rows and nearly equally many tokens.

    Mini-batch m begins at row ``m * B / num_minibatches``, whatever ``dp_size`` is. So the rows of
    an optimizer step do not depend on the number of ranks. Within it the next longest row goes to
    the rank with the fewest tokens that still needs rows (LPT).

    Returns:
        A permutation. It puts the rows of rank r into slice r of ``dp_size`` equal slices of the
        batch. Each slice consists of ``num_minibatches`` equal mini-batches. Within a mini-batch
        ranks differ by at most as many tokens as in the given order.

    Raises:
        DispatchError: the rows do not divide evenly.
    """
    num_parts = dp_size * num_minibatches
    if len(lengths_B) % num_parts:
        below = len(lengths_B) // num_parts * num_parts
        raise DispatchError(
            f"cannot divide {len(lengths_B)} rows evenly over {dp_size} data-parallel ranks x "
            f"{num_minibatches} mini-batches; make trainer.num_prompts_per_step x "
            f"rollout.num_responses_per_prompt {below or num_parts} or {below + num_parts}"
        )
    if dp_size == 1:
        return list(range(len(lengths_B)))
    minibatch_size = len(lengths_B) // num_minibatches
    rows_of_rank: list[list[int]] = [[] for _ in range(dp_size)]
    for begin in range(0, len(lengths_B), max(minibatch_size, 1)):
        shares = _deal(range(begin, begin + minibatch_size), lengths_B, dp_size)
        for rank, share in enumerate(shares):
            rows_of_rank[rank].extend(share)
    return [row for rows in rows_of_rank for row in rows]


def _deal(rows: range, lengths_B: Sequence[int], dp_size: int) -> list[list[int]]:
    share_size = len(rows) // dp_size
    given = [list(rows[rank * share_size : (rank + 1) * share_size]) for rank in range(dp_size)]
    dealt: list[list[int]] = [[] for _ in range(dp_size)]
    poorest = [(0, rank) for rank in range(dp_size)]
    for row in sorted(rows, key=lambda row: (-lengths_B[row], row)):
        num_tokens, rank = heapq.heappop(poorest)
        dealt[rank].append(row)
        if len(dealt[rank]) < share_size:
            heapq.heappush(poorest, (num_tokens + lengths_B[row], rank))
    # With equal counts the greedy deal can be worse than the given order, which is then kept.
    return min(dealt, given, key=lambda shares: _spread(shares, lengths_B))


def _spread(shares: Sequence[Sequence[int]], lengths_B: Sequence[int]) -> int:
    tokens = [sum(lengths_B[row] for row in share) for share in shares]
    return max(tokens) - min(tokens)
