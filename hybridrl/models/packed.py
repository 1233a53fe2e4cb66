"""Attention over rows laid end to end, so that all other layers compute on real tokens only.

Transformers calls the attention function that is registered under ``PACKED_ATTENTION``; the caller
of the model hands the layout of the rows through as the keyword ``pack_layout``. Transformers
builds no mask for attention functions it does not know, and none is needed.

Legend: T packed tokens, R rows, L longest row of a bucket, N heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from hybridrl.errors import ModelError

PACKED_ATTENTION = "hybridrl_packed"

AttentionKernel = Literal["padded", "varlen"]

# Within a bucket the shortest stretch has at least this share of the longest one's tokens: bounds
# the padding of the padded kernel without making one small kernel call per length.
_SHORTEST_TO_LONGEST = 0.6


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a pack: a row, a prompt that several rows share, or what follows such a prompt.

    Its tokens attend to themselves and what comes before them in the row.
    """

    num_tokens: int
    """>= 1."""

    prefix: int | None = None
    """Number of the segment, itself without a prefix, that holds the beginning of the row."""


class PackLayout(Protocol):
    """Where the rows of a pack begin and end, in the form one attention kernel wants."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        ...

    def attend(
        self, query_TND: Tensor, key_TND: Tensor, value_TND: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend causally within each row.

        Args:
            query_TND: float [T, N, D].
            key_TND: float [T, N', D] where N' divides N (grouped queries).
            value_TND: float [T, N', D].
            scale: factor on the scores; None is ``1 / sqrt(D)``.

        Returns:
            Like ``query_TND``.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Bucket:
    """R segments of similar length that one kernel call attends from: ``R * L`` query slots."""

    num_segments: int
    num_columns: int
    key_token: Tensor  # int64 [R * K], packed token of each key slot; padding repeats the last
    is_visible_R1LK: Tensor | None  # bool; None: the segments have no prefix, causal is enough


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Attention through the stock kernel: segments padded on the right, bucket by bucket.

    Padding lies in the future of every real token, so a causal mask hides it.
    """

    buckets: tuple[_Bucket, ...]
    slot_of_token: Tensor  # int64 [T], place of each packed token among the slots of all buckets
    longest_row: int

    def attend(
        self, query_TND: Tensor, key_TND: Tensor, value_TND: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend causally within each row; see ``PackLayout.attend``."""
        sizes = [bucket.num_segments * bucket.num_columns for bucket in self.buckets]
        slots = _Pad.apply(query_TND, self.slot_of_token, sum(sizes))  # type: ignore[no-untyped-call]
        outputs = []
        for bucket, query in zip(self.buckets, torch.split(slots, sizes), strict=True):
            query_RNLD, key_RNKD, value_RNKD = (
                states.view(bucket.num_segments, -1, *states.shape[1:]).transpose(1, 2)
                for states in (
                    query,
                    key_TND.index_select(0, bucket.key_token),
                    value_TND.index_select(0, bucket.key_token),
                )
            )
            output_RNLD = nn.functional.scaled_dot_product_attention(
                query_RNLD,
                key_RNKD,
                value_RNKD,
                attn_mask=bucket.is_visible_R1LK,
                is_causal=bucket.is_visible_R1LK is None,
                scale=scale,
                enable_gqa=query_TND.shape[1] != key_TND.shape[1],
            )
            outputs.append(output_RNLD.transpose(1, 2).flatten(0, 1))
        return _Unpad.apply(torch.cat(outputs), self.slot_of_token)  # type: ignore[no-any-return, no-untyped-call]


# Each token has one slot, so either direction's gradient is the other direction. Autograd does not
# know that: its gradient of index_select adds token by token, 5 times slower here.


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
class VarlenLayout:
    """Attention through torch's variable-length flash kernel: CUDA, 16-bit types, no padding."""

    row_offsets: Tensor  # int32 [R + 1], place of each row's first token
    longest_row: int

    def attend(
        self, query_TND: Tensor, key_TND: Tensor, value_TND: Tensor, *, scale: float | None
    ) -> Tensor:
        """Attend causally within each row; see ``PackLayout.attend``."""
        # Heads are repeated here because the flag for grouped queries differs between torch 2.11
        # and 2.13; the kernel sees the same numbers.
        num_repeats = query_TND.shape[1] // key_TND.shape[1]
        output = varlen_attn(
            query_TND,
            key_TND.repeat_interleave(num_repeats, dim=1),
            value_TND.repeat_interleave(num_repeats, dim=1),
            self.row_offsets,
            self.row_offsets,
            self.longest_row,
            self.longest_row,
            scale=scale,
            window_size=(-1, 0),
        )
        return cast("Tensor", output)


def build_layout(
    segments: Sequence[Segment], *, kernel: AttentionKernel, device: torch.device
) -> PackLayout:
    """Describe a pack to an attention kernel.

    Args:
        segments: in packed order. Neighbours of similar length pad least.
        kernel: ``padded`` runs everywhere; ``varlen`` on CUDA in 16-bit types, and takes no
            segments with a prefix.
        device: where the model computes.
    """
    lengths = torch.tensor([segment.num_tokens for segment in segments])
    begins = lengths.cumsum(0) - lengths
    prefix = torch.tensor([-1 if s.prefix is None else s.prefix for s in segments])
    prefix_lengths = lengths[prefix].masked_fill(prefix < 0, 0)
    longest_row = int((prefix_lengths + lengths).max())
    if kernel == "varlen":
        row_offsets = torch.cat([begins, lengths.sum()[None]])
        return VarlenLayout(row_offsets.to(device, torch.int32), longest_row)
    places = torch.stack([begins, lengths, begins[prefix], prefix_lengths])
    buckets = []
    slots_of_tokens = []
    num_slots = 0
    for first, last in _bucket_bounds(lengths.tolist(), prefix_lengths.tolist()):
        bucket = _build_bucket(places[:, first:last, None], device)
        is_token_RL = torch.arange(bucket.num_columns) < lengths[first:last, None]
        slots_of_tokens.append(num_slots + is_token_RL.flatten().nonzero()[:, 0])
        num_slots += is_token_RL.numel()
        buckets.append(bucket)
    return PaddedLayout(tuple(buckets), torch.cat(slots_of_tokens).to(device), longest_row)


def _build_bucket(places_4R1: Tensor, device: torch.device) -> _Bucket:
    """Build a bucket from its segments' begins and lengths, and those of their prefixes."""
    begin_R1, length_R1, prefix_begin_R1, prefix_length_R1 = places_4R1
    columns_1K = torch.arange(int((prefix_length_R1 + length_R1).max()))[None]
    own_RK = torch.minimum(columns_1K - prefix_length_R1, length_R1 - 1)
    is_own_RK = columns_1K >= prefix_length_R1
    key_token_RK = torch.where(is_own_RK, begin_R1 + own_RK, prefix_begin_R1 + columns_1K)
    num_columns = int(length_R1.max())
    is_visible_R1LK = None
    if prefix_length_R1.any():
        row_position_RL = prefix_length_R1 + torch.arange(num_columns)
        is_visible_RLK = columns_1K[None] <= row_position_RL[:, :, None]
        is_visible_R1LK = is_visible_RLK[:, None].to(device)
    return _Bucket(
        num_segments=len(length_R1),
        num_columns=num_columns,
        key_token=key_token_RK.flatten().to(device),
        is_visible_R1LK=is_visible_R1LK,
    )


def _bucket_bounds(lengths: list[int], prefix_lengths: list[int]) -> list[tuple[int, int]]:
    """Cut the segments, in their order, into stretches of similar ones: [(first, last + 1)]."""
    rows = [sum(pair) for pair in zip(lengths, prefix_lengths, strict=True)]
    bounds = []
    first = 0
    for here in range(1, len(lengths)):
        stretch = slice(first, here + 1)
        is_same_kind = bool(prefix_lengths[first]) == bool(prefix_lengths[here])
        if not (is_same_kind and _are_similar(lengths[stretch]) and _are_similar(rows[stretch])):
            bounds.append((first, here))
            first = here
    return [*bounds, (first, len(lengths))]


def _are_similar(lengths: list[int]) -> bool:
    return min(lengths) >= _SHORTEST_TO_LONGEST * max(lengths)


def _packed_attention(  # noqa: PLR0913 - transformers chooses these
    module: nn.Module,
    query_1NTD: Tensor,
    key_1NTD: Tensor,
    value_1NTD: Tensor,
    attention_mask: Tensor | None,
    *,
    pack_layout: PackLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_unused: object,  # dropout among them: a policy gradient is taken at the sampled policy
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ModelError(
            f"packed attention was given a mask of shape {tuple(attention_mask.shape)}; "
            "call the model with attention_mask=None, the layout alone separates rows"
        )
    if sliding_window is not None and pack_layout.longest_row > sliding_window:
        raise ModelError(
            f"a row of {pack_layout.longest_row} tokens is longer than the model's sliding window "
            f"of {sliding_window} tokens; set data.max_prompt_tokens and "
            f"rollout.max_response_tokens so that their sum is at most {sliding_window}"
        )
    output_TND = pack_layout.attend(
        query_1NTD[0].transpose(0, 1),
        key_1NTD[0].transpose(0, 1),
        value_1NTD[0].transpose(0, 1),
        scale=scaling,
    )
    return output_TND[None], None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
