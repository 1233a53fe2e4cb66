"""Context parallelism: several ranks share a micro-batch's tokens.

There are two ways to attend:

- Heads (Ulysses, arXiv:2309.14509): before each attention ranks exchange tokens for heads, and
  after it heads for tokens. A rank attends from all tokens, in its share of the heads. Tokens are
  dealt out in turns, so that all ranks have as many scored ones.
- Keys (arXiv:2407.21783, 3.3.2): queries stay on their rank; keys and values of all tokens are
  gathered before each attention, and their gradients summed over ranks. A late token attends to
  more tokens than an early one. So each segment is divided into twice as many pieces as ranks, and
  a rank has an early and a late piece.

Legend: T packed tokens, U tokens of this rank, W ranks, N heads, J key-value heads, D size of a
head, F numbers of a token for one rank, K spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.errors import ModelError
from hybridrl.models.packed_attention import (
    AttentionKernel,
    KeySpans,
    PackLayout,
    RowAttention,
    Segment,
    padded_layout,
    varlen_spans,
)
from hybridrl.models.recurrent import Mix
from hybridrl.models.varlen import as_wide_as_keys


@dataclass(frozen=True, slots=True)
class ContextParallelRank:
    """This rank among those that share the tokens of each micro-batch."""

    rank: int
    size: int
    # from [U, ...] of this rank to [W U, ...] of all in their order; its gradient is summed over
    # the ranks and scattered
    gather: Callable[[Tensor], Tensor]
    # from [U, W, F], a part for each rank, to [U, W, F], a part from each rank; its gradient goes
    # back in the same way. None: ranks gather keys, and do not share heads.
    exchange: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of a micro-batch that a rank has."""

    own_U: Tensor  # int64, on the host: packed tokens of the rank, in its order
    num_padding: int  # padding tokens at the end, with which all ranks have equally many tokens
    layout: PackLayout


def deal_out(
    num_tokens: int, num_padding: int, attention: RowAttention, share: ContextParallelRank
) -> SharedTokens:
    """Give ranks, in turns, the tokens and the padding after them; W divides their sum.

    ``attention`` is that of all of them.
    """
    dealt = torch.arange(share.rank, num_tokens + num_padding, share.size)
    own_U = dealt[dealt < num_tokens]
    return SharedTokens(own_U, len(dealt) - len(own_U), LayoutOfHeads(attention, share))


def split_for_context_parallel(
    segments: Sequence[Segment],
    share: ContextParallelRank,
    *,
    multiple: int,
    kernel: AttentionKernel,
    device: torch.device,
) -> SharedTokens:
    """Divide a micro-batch over ranks, and describe this rank's tokens to an attention kernel.

    ``multiple`` divides the tokens of a rank.
    """
    all_spans = KeySpans.of(segments)
    lengths_K = all_spans.num_tokens_K
    segment_T = torch.arange(len(segments)).repeat_interleave(lengths_K)
    within_T = torch.arange(len(segment_T)) - (lengths_K.cumsum(0) - lengths_K)[segment_T]
    # Piece j begins at token floor(j * length / pieces).
    num_pieces = 2 * share.size
    piece_T = ((within_T + 1) * num_pieces - 1) // lengths_K[segment_T]
    owner_T = torch.minimum(piece_T, num_pieces - 1 - piece_T)
    # Early pieces first, then late ones: neighbours of similar length need least padding.
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
    spans = _spans(all_spans, segment_T[own_U], piece_T[own_U], within_T[own_U])
    if num_padding:
        padding_tokens = range(len(order_T), len(order_T) + num_padding)
        lengths_K = pad(spans.num_tokens_K, (0, 1), value=num_padding)
        spans = KeySpans(lengths_K, [*spans.runs_K, (padding_tokens,)])
        first = share.rank * num_each + count
        padding = torch.arange(first, first + num_padding)
        key_of_token_T = torch.cat([key_of_token_T, padding])
    describe = varlen_spans if kernel == "varlen" else padded_layout
    layout = SharedLayout(describe(spans, key_of_token_T, device), share.gather)
    return SharedTokens(own_U, num_padding, layout)


@dataclass(frozen=True, slots=True)
class _PartOfRows:
    """Tokens of rows whose other tokens are on other ranks."""

    attention: RowAttention

    @property
    def longest_row(self) -> int:
        """See ``RowAttention``."""
        return self.attention.longest_row

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """Raise ModelError: a state goes through all tokens of a row."""
        raise ModelError(
            "recurrent layers need all tokens of a row on one rank; set "
            "actor.fsdp2.context_parallel_size=1"
        )


@dataclass(frozen=True, slots=True)
class SharedLayout(_PartOfRows):
    """Attention of this rank's tokens to those of all ranks that share the micro-batch.

    ``attention`` takes this rank's queries, and the gathered keys and values.
    """

    gather: Callable[[Tensor], Tensor]

    def attend(
        self,
        query_UND: Tensor,
        key_UJD: Tensor,
        value_UJD: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend causally within each row; a collective call. See ``RowAttention.attend``."""
        key_TJD, value_TJD = self.gathered(key_UJD, value_UJD)
        return self.attention.attend(
            query_UND, key_TJD, value_TJD, scale=scale, window=window, sink_N=sink_N
        )

    def gathered(self, key_UJD: Tensor, value_UJD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all ranks' tokens, float [T, J, D]; a collective call."""
        both_U2JD = torch.stack([key_UJD, as_wide_as_keys(value_UJD, key_UJD)], dim=1)
        key_TJD, value_TJD = self.gather(both_U2JD).unbind(1)
        return key_TJD, value_TJD[..., : value_UJD.shape[-1]]


@dataclass(frozen=True, slots=True)
class LayoutOfHeads(_PartOfRows):
    """Attention of all ranks' tokens, by ``attention``, in this rank's share of the heads."""

    share: ContextParallelRank  # its `exchange` is set

    def attend(
        self,
        query_UND: Tensor,
        key_UJD: Tensor,
        value_UJD: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend causally within each row; a collective call. See ``RowAttention.attend``."""
        size, num_tokens, exchange = self.share.size, len(query_UND), self.share.exchange
        if exchange is None:
            raise TypeError("ranks that share heads need an exchange")
        # Heads of keys that W does not divide are repeated, as heads of queries share them.
        num_copies = size // math.gcd(size, key_UJD.shape[1])
        if num_copies > 1:
            key_UJD = key_UJD.repeat_interleave(num_copies, dim=1)
            value_UJD = value_UJD.repeat_interleave(num_copies, dim=1)
        states = (query_UND, key_UJD, value_UJD)
        parts = [each.reshape(num_tokens, size, -1) for each in states]
        all_TF = exchange(torch.cat(parts, dim=2)).flatten(0, 1)
        of_states = torch.split(all_TF, [part.shape[2] for part in parts], dim=1)
        query_TND, key_TJD, value_TJD = (
            own_TF.reshape(len(own_TF), -1, each.shape[2])
            for own_TF, each in zip(of_states, states, strict=True)
        )
        attended_TND = self.attention.attend(
            query_TND,
            key_TJD,
            value_TJD,
            scale=scale,
            window=window,
            sink_N=None if sink_N is None else sink_N.reshape(size, -1)[self.share.rank],
        )
        heads_UWF = exchange(attended_TND.reshape(num_tokens, size, -1))
        return heads_UWF.reshape(num_tokens, query_UND.shape[1], -1)


def _spans(all_spans: KeySpans, segment_U: Tensor, piece_U: Tensor, within_U: Tensor) -> KeySpans:
    """Join a rank's tokens that are neighbours in a segment."""
    is_first_U = torch.ones_like(segment_U, dtype=torch.bool)
    is_first_U[1:] = (segment_U.diff() != 0) | (piece_U.diff() != 0)
    first_K = is_first_U.nonzero()[:, 0]
    lengths_K = torch.cat([first_K, torch.tensor([len(segment_U)])]).diff()
    runs_K = []
    columns = (segment_U[first_K], within_U[first_K] + lengths_K)
    for segment, end in zip(*(column.tolist() for column in columns), strict=True):
        *prefix, own = all_spans.runs_K[segment]
        runs_K.append((*prefix, own[:end]))
    return KeySpans(lengths_K, runs_K)
