"""Rotary embeddings of tokens whose angles are given one by one."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str, *, interleaved: bool, fused: bool
) -> Tensor:
    """Rotate [s, b, h, d] by angles [s, 1, 1, d]."""
    assert fused
    assert not interleaved
    assert tensor_format == "sbhd"
    assert freqs.dtype == torch.float32
    assert freqs.shape == (len(t), 1, 1, t.shape[-1])
    first, second = t.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return t * freqs.cos().to(t.dtype) + turned * freqs.sin().to(t.dtype)
