"""Attention over rows laid end to end: all other layers compute without padding.

Legend: T packed tokens, R rows, L longest row of a bucket or queries of a row, K keys of a row, N
heads, J key-value heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from hybridrl.models.recurrent import Mix, RowsOfTokens
from hybridrl.models.varlen import SharedPrompts, VarlenCall, VarlenLayout

AttentionKernel = Literal["padded", "varlen"]

Runs: TypeAlias = tuple[range, ...]
"""Packed tokens in the order of their row."""

# Within a bucket the shortest span has at least this share of the longest one's tokens. That bounds
# the padding without one small kernel call per length.
_SHORTEST_TO_LONGEST = 0.6


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a micro-batch: a row, a beginning that several rows share, or the rest of a row.

    They attend to themselves and to all tokens before them in the row.
    """

    num_tokens: int  # >= 1
    # the tokens before it in its row, which other segments compute. The first run is a segment
    # without a prefix.
    prefix: Runs = ()


class RowAttention(Protocol):
    """Where the rows of a micro-batch begin and end, in the form of one attention kernel."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that this rank sees."""
        ...

    def attend(
        self,
        query_TND: Tensor,
        key_TND: Tensor,
        value_TND: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend causally within each row.

        Args:
            query_TND: float [T, N, D].
            key_TND: float [T, N', D] where N' divides N (grouped queries).
            value_TND: float [T, N', D].
            scale: factor on the scores; None is ``1 / sqrt(D)``.
            window: newest tokens that a token sees, itself among them; None: the full row.
            sink_N: a score of each head that takes its share of the attention, of a value of 0.

        Returns:
            Like ``query_TND``.
        """
        ...


class PackLayout(RowAttention, RowsOfTokens, Protocol):
    """The rows of a micro-batch, to all layers that mix tokens.

    Attention computes a prompt that rows share once, recurrent layers in each of the rows.
    """


@dataclass(frozen=True, slots=True)
class _Bucket:
    """R segments of similar length that one kernel call attends from: ``R * L`` query slots."""

    num_segments: int
    num_columns: int
    num_seen_R1: Tensor  # int64, on the host: tokens of the row before each segment
    key_token: Tensor  # int64 [R * K], packed token of each key slot; padding repeats the last
    is_visible_R1LK: Tensor | None  # bool; None: the segments have no prefix, causal is enough

    def visible(self, window: int | None) -> Tensor | None:
        """Return ``is_visible_R1LK`` where tokens see the last ``window`` ones alone."""
        num_keys = len(self.key_token) // self.num_segments
        if window is None or num_keys <= window:
            return self.is_visible_R1LK
        device = self.key_token.device
        return _visibility(self.num_seen_R1.to(device), self.num_columns, num_keys, window)

    def own_columns(self) -> Tensor:
        """Return which key slot of its row each query slot is, int64 [R, L, 1]."""
        own_RL = self.num_seen_R1 + torch.arange(self.num_columns)
        last = len(self.key_token) // self.num_segments - 1
        return own_RL.clamp_(max=last)[..., None].to(self.key_token.device)


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Attention through the stock kernel: segments padded on the right, bucket by bucket.

    Padding lies in the future of every real token, so a causal mask hides it.
    """

    buckets: tuple[_Bucket, ...]
    slot_of_token: Tensor  # int64 [T], index of each packed token among the slots of all buckets
    longest_row: int
    # masks of all buckets by window; layers share them
    _masks: dict[int | None, list[Tensor | None]] = field(default_factory=dict)
    # of all buckets; recurrent layers share them
    _own_columns: list[Tensor] = field(default_factory=list)

    def attend(
        self,
        query_TND: Tensor,
        key_TND: Tensor,
        value_TND: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend causally within each row; see ``RowAttention.attend``."""
        if window not in self._masks:
            self._masks[window] = [bucket.visible(window) for bucket in self.buckets]
        sizes = [bucket.num_segments * bucket.num_columns for bucket in self.buckets]
        slots = _Pad.apply(query_TND, self.slot_of_token, sum(sizes))  # type: ignore[no-untyped-call]
        outputs = []
        queries, masks = torch.split(slots, sizes), self._masks[window]
        for bucket, query, is_visible_R1LK in zip(self.buckets, queries, masks, strict=True):
            query_RNLD, key_RNKD, value_RNKD = (
                states.view(bucket.num_segments, -1, *states.shape[1:]).transpose(1, 2)
                for states in (
                    query,
                    key_TND.index_select(0, bucket.key_token),
                    value_TND.index_select(0, bucket.key_token),
                )
            )
            output_RNLD = fused_attention(
                query_RNLD,
                key_RNKD,
                value_RNKD,
                is_visible_R1LK=is_visible_R1LK,
                scale=scale,
                sink_N=sink_N,
            )
            outputs.append(output_RNLD.transpose(1, 2).flatten(0, 1))
        return _Unpad.apply(torch.cat(outputs), self.slot_of_token)  # type: ignore[no-any-return, no-untyped-call]

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """See ``RowsOfTokens``: padding on the right comes after all that counts."""
        if not self._own_columns:
            self._own_columns.extend(bucket.own_columns() for bucket in self.buckets)
        outputs = []
        for bucket, own_RL1 in zip(self.buckets, self._own_columns, strict=True):
            rows_RKH = hidden_TH[bucket.key_token].view(bucket.num_segments, -1, hidden_TH.shape[1])
            mixed_RKH = mix(hidden_states=rows_RKH)
            outputs.append(mixed_RKH.take_along_dim(own_RL1, dim=1).flatten(0, 1))
        return _Unpad.apply(torch.cat(outputs), self.slot_of_token)  # type: ignore[no-any-return, no-untyped-call]


# Each token has one slot, so the gradient of either direction is the other direction. Autograd's
# own gradient of index_select adds token by token, which is 5 times slower here.


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slot_of_token: Tensor, num_slots: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(slot_of_token)
        slots = tokens.new_zeros(num_slots, *tokens.shape[1:])
        return slots.index_copy_(0, slot_of_token, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (slot_of_token,) = ctx.saved_tensors
        return grads[0].index_select(0, slot_of_token), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, slot_of_token: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(slot_of_token)
        ctx.num_slots = len(slots)
        return slots.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (slot_of_token,) = ctx.saved_tensors
        slots = grads[0].new_zeros(ctx.num_slots, *grads[0].shape[1:])
        return slots.index_copy_(0, slot_of_token, grads[0]), None


@dataclass(frozen=True, slots=True)
class KeySpans:
    """Spans of query tokens, and the keys that each span sees: the last ones are its own."""

    num_tokens_K: Tensor  # int64, on the host
    runs_K: Sequence[Runs]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> KeySpans:
        """Make each segment of a micro-batch one span."""
        lengths_K = torch.tensor([segment.num_tokens for segment in segments])
        ends = lengths_K.cumsum(0).tolist()
        pairs = zip(segments, ends, strict=True)
        return cls(lengths_K, [(*s.prefix, range(end - s.num_tokens, end)) for s, end in pairs])

    @property
    def num_keys_K(self) -> Tensor:
        """Tokens of the span's row up to its end."""
        return torch.tensor([sum(map(len, runs)) for runs in self.runs_K])

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row up to the end of its last span."""
        return int(self.num_keys_K.max())


def tokens_of(rows: Iterable[Runs]) -> Tensor:
    """Return the packed tokens of rows, end to end, int64 on the host."""
    runs = [(run.start, len(run)) for of_row in rows for run in of_row]
    begin_M, length_M = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).T
    shift_M = begin_M - (length_M.cumsum(0) - length_M)
    shift_T: Tensor = shift_M.repeat_interleave(length_M)
    return torch.arange(len(shift_T)) + shift_T


def build_layout(
    segments: Sequence[Segment], *, kernel: AttentionKernel, device: torch.device
) -> PackLayout:
    """Describe a micro-batch to an attention kernel.

    Args:
        segments: in packed order. Neighbours of similar length pad least.
        kernel: ``padded`` runs everywhere; ``varlen`` on CUDA in 16-bit types. It takes segments
            with a prefix last, and what their prefixes begin with first, in the same order.
    """
    spans = KeySpans.of(segments)
    if kernel == "varlen":
        return _varlen_layout(spans, device)
    return padded_layout(spans, None, device)


def _varlen_layout(spans: KeySpans, device: torch.device) -> VarlenLayout:
    offsets = pad(spans.num_tokens_K.cumsum(0), (1, 0))
    own_offsets, longest = offsets.to(device, torch.int32), int(spans.num_tokens_K.max())
    own = VarlenCall(own_offsets, own_offsets, (longest, longest))
    padded = cache(lambda: padded_layout(spans, None, device))
    num_tails = sum(len(runs) > 1 for runs in spans.runs_K)
    if not num_tails:
        return VarlenLayout(own, spans.longest_row, padded)
    first_tail = len(spans.runs_K) - num_tails
    by_prompt = groupby(spans.runs_K[first_tail:], key=lambda runs: runs[0])
    tails = [(prompt, sum(len(runs[-1]) for runs in of_prompt)) for prompt, of_prompt in by_prompt]
    if [prompt for prompt, _ in tails] != [runs[-1] for runs in spans.runs_K[: len(tails)]]:
        raise ValueError(
            "the varlen kernel takes prefixes first, then their rows in the same order"
        )
    tokens_P = torch.tensor([num_tokens for _, num_tokens in tails])
    call = VarlenCall(
        pad(tokens_P.cumsum(0), (1, 0)).to(device, torch.int32),
        own_offsets[: len(tails) + 1],
        (int(tokens_P.max()), max(len(prompt) for prompt, _ in tails)),
        is_causal=False,
    )
    prompts = SharedPrompts(call, int(offsets[first_tail]), int(offsets[len(tails)]))
    token_T = torch.arange(int(offsets[-1]))
    if max(map(len, spans.runs_K)) > 2:  # prompts are seen by the other call
        behind = KeySpans(spans.num_tokens_K, [runs[1:] or runs for runs in spans.runs_K])
        own = _call_on_copies(behind, token_T, device)
    in_rows = cache(lambda: _call_on_copies(spans, token_T, device))
    return VarlenLayout(own, spans.longest_row, padded, prompts, in_rows)


def varlen_spans(spans: KeySpans, key_of_token_T: Tensor, device: torch.device) -> VarlenLayout:
    """Describe spans, each with all keys that it sees, to the varlen kernel.

    Args:
        spans: laid end to end, they are the query tokens.
        key_of_token_T: int64, on the host: index of each token's key among the keys of ``attend``.
    """
    call = _call_on_copies(spans, key_of_token_T, device)
    padded = cache(lambda: padded_layout(spans, key_of_token_T, device))
    return VarlenLayout(call, spans.longest_row, padded)


def _call_on_copies(spans: KeySpans, key_of_token_T: Tensor, device: torch.device) -> VarlenCall:
    num_keys_K = spans.num_keys_K
    return VarlenCall(
        query_offsets=pad(spans.num_tokens_K.cumsum(0), (1, 0)).to(device, torch.int32),
        key_offsets=pad(num_keys_K.cumsum(0), (1, 0)).to(device, torch.int32),
        longest=(int(spans.num_tokens_K.max()), int(num_keys_K.max())),
        key_token=key_of_token_T[tokens_of(spans.runs_K)].to(device),
    )


def padded_layout(
    spans: KeySpans, key_of_token_T: Tensor | None, device: torch.device
) -> PaddedLayout:
    """Describe spans to the stock kernel, as ``varlen_spans``; None keeps the tokens' order."""
    lengths, num_keys_K = spans.num_tokens_K, spans.num_keys_K
    buckets = []
    slots_of_tokens = []
    num_slots = 0
    for first, last in _bucket_bounds(lengths.tolist(), (num_keys_K - lengths).tolist()):
        row = slice(first, last)
        bucket_spans = KeySpans(lengths[row], spans.runs_K[row])
        bucket = _build_bucket(bucket_spans, num_keys_K[row, None], device, key_of_token_T)
        is_token_RL = torch.arange(bucket.num_columns) < lengths[row, None]
        slots_of_tokens.append(num_slots + is_token_RL.flatten().nonzero()[:, 0])
        num_slots += is_token_RL.numel()
        buckets.append(bucket)
    slot_of_token = torch.cat(slots_of_tokens).to(device)
    return PaddedLayout(tuple(buckets), slot_of_token, spans.longest_row)


def _build_bucket(
    spans: KeySpans, num_keys_R1: Tensor, device: torch.device, key_of_token: Tensor | None
) -> _Bucket:
    columns_1K = torch.arange(int(num_keys_R1.max()))[None]
    first_R1 = num_keys_R1.cumsum(0) - num_keys_R1
    key_token_RK = tokens_of(spans.runs_K)[first_R1 + torch.minimum(columns_1K, num_keys_R1 - 1)]
    if key_of_token is not None:
        key_token_RK = key_of_token[key_token_RK]
    num_seen_R1, num_columns = (
        num_keys_R1 - spans.num_tokens_K[:, None],
        int(spans.num_tokens_K.max()),
    )
    is_visible_R1LK = None
    if num_seen_R1.any():
        num_keys = columns_1K.shape[1]
        is_visible_R1LK = _visibility(num_seen_R1.to(device), num_columns, num_keys, num_keys)
    return _Bucket(
        num_segments=len(num_seen_R1),
        num_columns=num_columns,
        num_seen_R1=num_seen_R1,
        key_token=key_token_RK.flatten().to(device),
        is_visible_R1LK=is_visible_R1LK,
    )


def _visibility(num_seen_R1: Tensor, num_columns: int, num_keys: int, window: int) -> Tensor:
    """Return which of the first K keys of its row each query sees, bool [R, 1, L, K]."""
    row_position_RL = num_seen_R1 + torch.arange(num_columns, device=num_seen_R1.device)
    # Padding behind the last key sees it: without any key its output and gradient were NaN.
    row_position_RL1 = row_position_RL.clamp_(max=num_keys - 1)[:, :, None]
    columns_K = torch.arange(num_keys, device=num_seen_R1.device)
    is_visible_RLK = columns_K <= row_position_RL1
    if window < num_keys:
        is_visible_RLK &= columns_K > row_position_RL1 - window
    return is_visible_RLK[:, None]


def _bucket_bounds(lengths: list[int], prefix_lengths: list[int]) -> list[tuple[int, int]]:
    """Divide the segments, in their order, into runs of similar length: [(first, last + 1)]."""
    rows = [sum(pair) for pair in zip(lengths, prefix_lengths, strict=True)]
    bounds = []
    first = 0
    for bound in range(1, len(lengths)):
        candidate = slice(first, bound + 1)
        is_same_kind = bool(prefix_lengths[first]) == bool(prefix_lengths[bound])
        if not (
            is_same_kind and _are_similar(lengths[candidate]) and _are_similar(rows[candidate])
        ):
            bounds.append((first, bound))
            first = bound
    return [*bounds, (first, len(lengths))]


def _are_similar(lengths: list[int]) -> bool:
    return min(lengths) >= _SHORTEST_TO_LONGEST * max(lengths)


_FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]  # they never write all scores of a row


def fused_attention(
    query_RNLD: Tensor,
    key_RJKD: Tensor,
    value_RJKD: Tensor,
    *,
    is_visible_R1LK: Tensor | None,
    scale: float | None,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Attend, causally if there is no mask; returns like ``query_RNLD``.

    On CUDA heads of keys and values are repeated for the queries that share them. In float32 or
    with a mask only the memory-efficient kernel remains, which does not support shared heads
    (pytorch, ``sdp_utils.cpp``). torch would choose the kernel that writes ``R * N * L * K``
    scores, 27 GiB for two rows of 8k tokens; here that is an error. On a CPU torch chooses: its
    kernel takes masks, shared heads and float32.
    """
    head_size = query_RNLD.shape[-1]
    if sink_N is not None:
        scale = head_size**-0.5 if scale is None else scale
        query_RNLD, key_RJKD, value_RJKD, is_visible_R1LK = with_sink(
            query_RNLD, key_RJKD, value_RJKD, is_visible_R1LK, sink_N[:, None, None] / scale
        )
    num_repeats = query_RNLD.shape[1] // key_RJKD.shape[1]
    if query_RNLD.is_cuda:
        key_RJKD = key_RJKD.repeat_interleave(num_repeats, dim=1)
        value_RJKD = value_RJKD.repeat_interleave(num_repeats, dim=1)
    with sdpa_kernel(_FUSED) if query_RNLD.is_cuda else nullcontext():
        output_RNLD = nn.functional.scaled_dot_product_attention(
            query_RNLD,
            key_RJKD,
            value_RJKD,
            attn_mask=is_visible_R1LK,
            is_causal=is_visible_R1LK is None,
            scale=scale,
            enable_gqa=query_RNLD.shape[1] != key_RJKD.shape[1],
        )
    return output_RNLD if sink_N is None else output_RNLD[..., :head_size]


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put a key of value 0 before all others, whose product with a query is its score.

    Queries get the score as one more number, where this key alone has a 1. Any kernel that takes a
    mask then computes sinks and their gradient; some want head sizes that 8 divides.

    Args:
        query: float [..., L, D].
        key: float [..., K, D].
        value: float [..., K, D].
        mask: bool or float [..., L, K]; None: causal.
        score: broadcasts to [..., L, 1].

    Returns:
        The same, with heads of size D + 8 and K + 1 keys.
    """
    if mask is None:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    score = score.to(query.dtype).expand(*query.shape[:-1], 1)
    query = pad(torch.cat([query, score], dim=-1), (0, 7))
    key, value = (pad(states, (0, 8, 1, 0)) for states in (key, value))
    is_sink = torch.arange(key.shape[-2], device=key.device)[:, None] == 0
    is_one = torch.arange(key.shape[-1], device=key.device) == key.shape[-1] - 8
    key = key + (is_sink & is_one).to(key.dtype)
    return query, key, value, pad(mask, (1, 0), value=mask.dtype is torch.bool)
