"""Packs whose tokens several ranks share: context parallelism (arXiv:2407.21783, 3.3.2).

Queries stay where they are; keys and values of all tokens are gathered before each attention, and
their gradients summed back. A late token attends to more than an early one, so each segment is cut
in twice as many pieces as there are ranks, and a rank has an early and a late one of each.

Legend: T packed tokens, U tokens of this rank, W ranks, N heads, J key-value heads, D size of a
head, K stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.models.packed import (
    AttentionKernel,
    KeySpans,
    PackLayout,
    Segment,
    padded_layout,
)
from hybridrl.models.varlen import VarlenCall, attend_in_stretches


@dataclass(frozen=True, slots=True)
class ContextParallelRank:
    """This rank among those that share the tokens of each pack."""

    rank: int
    size: int

    gather: Callable[[Tensor], Tensor]
    """From [U, ...] of this rank to [W U, ...] of all in their order; its gradient is summed over
    the ranks and scattered."""


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """What a rank has of a pack."""

    own_U: Tensor
    """int64, on the host: which packed tokens, in the order in which the rank has them."""

    num_padding: int
    """Tokens that follow and belong to no row, so that all ranks have as many."""

    layout: PackLayout


def split_for_context_parallel(
    segments: Sequence[Segment],
    share: ContextParallelRank,
    *,
    multiple: int,
    kernel: AttentionKernel,
    device: torch.device,
) -> SharedTokens:
    """Cut a pack into the shares of ranks, and describe this rank's to an attention kernel.

    Args:
        segments: of the whole pack.
        share: this rank.
        multiple: of which the tokens of a rank are a multiple.
        kernel: as for ``build_layout``.
        device: where the model computes.
    """
    all_stretches = KeySpans.of(segments)
    segment_T = torch.arange(len(segments)).repeat_interleave(all_stretches.num_tokens_K)
    within_T = torch.arange(len(segment_T)) - all_stretches.begin_K[segment_T]
    # Piece j begins at token floor(j * length / pieces).
    num_pieces = 2 * share.size
    piece_T = ((within_T + 1) * num_pieces - 1) // all_stretches.num_tokens_K[segment_T]
    owner_T = torch.minimum(piece_T, num_pieces - 1 - piece_T)
    # Early pieces first, then late ones: neighbours are alike, which pads least.
    order_T = (owner_T * num_pieces + piece_T).argsort(stable=True)
    counts_W = owner_T.bincount(minlength=share.size)
    num_each = -(-int(counts_W.max()) // multiple) * multiple
    begins_W = counts_W.cumsum(0) - counts_W
    key_of_token_T = torch.empty_like(order_T)
    key_of_token_T[order_T] = (
        owner_T[order_T] * num_each + torch.arange(len(order_T)) - begins_W[owner_T[order_T]]
    )
    begin, count = int(begins_W[share.rank]), int(counts_W[share.rank])
    own_U = order_T[begin : begin + count]
    num_padding = num_each - count
    spans = _spans(all_stretches, segment_T[own_U], piece_T[own_U], within_T[own_U])
    if num_padding:
        spans = _followed_by_padding(spans, begin=len(order_T), length=num_padding)
        first = share.rank * num_each + count
        padding = torch.arange(first, first + num_padding)
        key_of_token_T = torch.cat([key_of_token_T, padding])
    attend = _varlen if kernel == "varlen" else _padded
    layout = SharedLayout(attend(spans, key_of_token_T, device), share.gather)
    return SharedTokens(own_U, num_padding, layout)


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Attention of this rank's tokens to those of all ranks that share the pack."""

    attention: PackLayout
    """Takes this rank's queries, and keys and values as they are gathered."""

    gather: Callable[[Tensor], Tensor]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, as far as this rank sees it."""
        return self.attention.longest_row

    def attend(
        self, query_UND: Tensor, key_UJD: Tensor, value_UJD: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend causally within each row; a collective call. See ``PackLayout.attend``."""
        key_TJD, value_TJD = self.gathered(key_UJD, value_UJD)
        return self.attention.attend(query_UND, key_TJD, value_TJD, scale=scale)

    def gathered(self, key_UJD: Tensor, value_UJD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all ranks' tokens, float [T, J, D]; a collective call."""
        key_TJD, value_TJD = self.gather(torch.stack([key_UJD, value_UJD], dim=1)).unbind(1)
        return key_TJD, value_TJD


@dataclass(frozen=True, slots=True)
class VarlenSpans:
    """KeySpans for torch's variable-length flash kernel: CUDA, 16-bit types."""

    call: VarlenCall
    key_token: Tensor  # int64, keys to take: all that a stretch sees, stretch by stretch

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row, as far as this rank sees it."""
        return self.call.longest[1]

    def attend(
        self, query_UND: Tensor, key_TJD: Tensor, value_TJD: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend from each stretch to all before it in its row; see ``PackLayout.attend``."""
        return attend_in_stretches(
            query_UND,
            key_TJD.index_select(0, self.key_token),
            value_TJD.index_select(0, self.key_token),
            own=self.call,
            scale=scale,
        )


def _spans(whole: KeySpans, segment_U: Tensor, piece_U: Tensor, within_U: Tensor) -> KeySpans:
    """Join a rank's tokens that are neighbours in a segment."""
    is_first_U = torch.ones_like(segment_U, dtype=torch.bool)
    is_first_U[1:] = (segment_U.diff() != 0) | (piece_U.diff() != 0)
    first_K = is_first_U.nonzero()[:, 0]
    segment_K = segment_U[first_K]
    return KeySpans(
        num_tokens_K=torch.cat([first_K, torch.tensor([len(segment_U)])]).diff(),
        begin_K=whole.begin_K[segment_K],
        skip_K=within_U[first_K],
        prefix_begin_K=whole.prefix_begin_K[segment_K],
        prefix_length_K=whole.prefix_length_K[segment_K],
    )


def _followed_by_padding(spans: KeySpans, *, begin: int, length: int) -> KeySpans:
    return KeySpans(
        num_tokens_K=pad(spans.num_tokens_K, (0, 1), value=length),
        begin_K=pad(spans.begin_K, (0, 1), value=begin),
        skip_K=pad(spans.skip_K, (0, 1)),
        prefix_begin_K=pad(spans.prefix_begin_K, (0, 1)),
        prefix_length_K=pad(spans.prefix_length_K, (0, 1)),
    )


def _padded(spans: KeySpans, key_of_token_T: Tensor, device: torch.device) -> PackLayout:
    return padded_layout(spans, device=device, key_of_token=key_of_token_T)


def _varlen(spans: KeySpans, key_of_token_T: Tensor, device: torch.device) -> PackLayout:
    num_keys_K = spans.num_seen_K + spans.num_tokens_K
    key_offsets = pad(num_keys_K.cumsum(0), (1, 0))
    key = torch.arange(int(key_offsets[-1]))
    key_token = key - (key_offsets[:-1] - spans.begin_K).repeat_interleave(num_keys_K)
    call = VarlenCall(
        query_offsets=pad(spans.num_tokens_K.cumsum(0), (1, 0)).to(device, torch.int32),
        key_offsets=key_offsets.to(device, torch.int32),
        longest=(int(spans.num_tokens_K.max()), spans.longest_row),
    )
    return VarlenSpans(call, key_token=key_of_token_T[key_token].to(device))
