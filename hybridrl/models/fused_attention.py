"""torch's stock attention, restricted to kernels that never write all scores of a row.

Legend: R rows, L queries of a row, K keys of a row, N heads, J key-value heads, D size of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


def fused_attention(
    query_RNLD: Tensor,
    key_RJKD: Tensor,
    value_RJKD: Tensor,
    *,
    is_visible_R1LK: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attend, causally if there is no mask.

    On CUDA heads of keys and values are repeated for the queries that share them. In float32 or
    with a mask only the memory-efficient kernel remains, which does not support shared heads
    (pytorch, ``sdp_utils.cpp``). torch would choose the kernel that writes ``R * N * L * K``
    scores, 27 GiB for two rows of 8k tokens; here that is an error.

    Returns:
        Like ``query_RNLD``.
    """
    num_repeats = query_RNLD.shape[1] // key_RJKD.shape[1]
    if query_RNLD.is_cuda:
        key_RJKD = key_RJKD.repeat_interleave(num_repeats, dim=1)
        value_RJKD = value_RJKD.repeat_interleave(num_repeats, dim=1)
    with _allowed_kernels(query_RNLD.device):
        return nn.functional.scaled_dot_product_attention(
            query_RNLD,
            key_RJKD,
            value_RJKD,
            attn_mask=is_visible_R1LK,
            is_causal=is_visible_R1LK is None,
            scale=scale,
            enable_gqa=query_RNLD.shape[1] != key_RJKD.shape[1],
        )


def _allowed_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU torch's own choice: its kernel takes masks, shared heads and float32."""
    return sdpa_kernel(_FUSED) if device.type == "cuda" else nullcontext()
