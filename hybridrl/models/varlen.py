"""Attention over packed rows through torch's variable-length flash kernel.

Legend: T packed tokens, N heads, D size of a head, R rows, K stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Attention through torch's variable-length flash kernel: CUDA, 16-bit types, no padding."""

    row_offsets: Tensor  # int32 [R + 1], place of each row's first token
    longest_row: int

    def attend(
        self, query_TND: Tensor, key_TND: Tensor, value_TND: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend causally within each row; see ``PackLayout.attend``."""
        return attend_in_stretches(
            query_TND,
            key_TND,
            value_TND,
            offsets=(self.row_offsets, self.row_offsets),
            longest=(self.longest_row, self.longest_row),
            scale=scale,
        )


def attend_in_stretches(
    query_TND: Tensor,
    key_SND: Tensor,
    value_SND: Tensor,
    *,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Attend causally in each stretch, by torch's variable-length flash kernel.

    Args:
        query_TND: float [T, N, D].
        key_SND: float [S, N', D] where N' divides N (grouped queries).
        value_SND: float [S, N', D].
        offsets: int32 [K + 1] each, where stretches begin among queries and among keys. Where a
            stretch has more keys than queries, its last query sees all of them.
        longest: queries and keys of the longest stretch.
        scale: factor on the scores; None is ``1 / sqrt(D)``.
    """
    # Heads are repeated here because the flag for grouped queries differs between torch 2.11
    # and 2.13; the kernel sees the same numbers.
    num_repeats = query_TND.shape[1] // key_SND.shape[1]
    output = varlen_attn(
        query_TND,
        key_SND.repeat_interleave(num_repeats, dim=1),
        value_SND.repeat_interleave(num_repeats, dim=1),
        *offsets,
        *longest,
        scale=scale,
        window_size=(-1, 0),
    )
    return cast("Tensor", output)
