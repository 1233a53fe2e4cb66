"""Tokens sent to experts and back, as TransformerEngine's fused permutations order them."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, **_: object
) -> tuple[Tensor, Tensor]:
    """Return tokens expert by expert, and the way back."""
    is_sent = routing_map.bool().T
    token = torch.arange(len(inp), device=inp.device).expand_as(is_sent).masked_select(is_sent)
    assert num_out_tokens in (-1, len(token))
    return inp.index_select(0, token), token


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens expert by expert, their weights, and the way back."""
    permuted, token = moe_permute(inp, routing_map, num_out_tokens)
    return permuted, probs.T.masked_select(routing_map.bool().T), token


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    **_: object,
) -> Tensor:
    """Add up what experts made of each token."""
    assert merging_probs is None
    assert restore_shape is not None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return chunks in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return chunks in another order, with their weights."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )
