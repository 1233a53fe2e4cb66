"""torch's stock attention, restricted to kernels that never write all scores of a row.

Legend: R rows, L queries of a row, K keys of a row, N heads, J key-value heads, D size of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

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
    sink_N: Tensor | None = None,
) -> Tensor:
    """Attend, causally if there is no mask.

    On CUDA heads of keys and values are repeated for the queries that share them. In float32 or
    with a mask only the memory-efficient kernel remains, which does not support shared heads
    (pytorch, ``sdp_utils.cpp``). torch would choose the kernel that writes ``R * N * L * K``
    scores, 27 GiB for two rows of 8k tokens; here that is an error.

    Args:
        sink_N: a score of each head that takes its share of the attention, of a value of 0.

    Returns:
        Like ``query_RNLD``.
    """
    head_size = query_RNLD.shape[-1]
    if sink_N is not None:
        scale = head_size**-0.5 if scale is None else scale
        if is_visible_R1LK is None:
            shape = (query_RNLD.shape[2], key_RJKD.shape[2])
            is_visible_R1LK = query_RNLD.new_ones(shape, dtype=torch.bool).tril()
        query_RNLD, key_RJKD, value_RJKD, is_visible_R1LK = with_sink(
            query_RNLD, key_RJKD, value_RJKD, is_visible_R1LK, sink_N[:, None, None] / scale
        )
    num_repeats = query_RNLD.shape[1] // key_RJKD.shape[1]
    if query_RNLD.is_cuda:
        key_RJKD = key_RJKD.repeat_interleave(num_repeats, dim=1)
        value_RJKD = value_RJKD.repeat_interleave(num_repeats, dim=1)
    with _allowed_kernels(query_RNLD.device):
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, score: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put a key of value 0 before all others, whose product with a query is its score.

    Queries get the score as one more number, where this key alone has a 1. Any kernel that takes a
    mask then computes sinks and their gradient; some want head sizes that 8 divides.

    Args:
        query: float [..., L, D].
        key: float [..., K, D].
        value: float [..., K, D].
        mask: bool or float [..., L, K].
        score: broadcasts to [..., L, 1].

    Returns:
        The same, with heads of size D + 8 and K + 1 keys.
    """
    score = score.to(query.dtype).expand(*query.shape[:-1], 1)
    query = pad(torch.cat([query, score], dim=-1), (0, 7))
    key, value = (pad(states, (0, 8, 1, 0)) for states in (key, value))
    is_sink = torch.arange(key.shape[-2], device=key.device)[:, None] == 0
    is_one = torch.arange(key.shape[-1], device=key.device) == key.shape[-1] - 8
    key = key + (is_sink & is_one).to(key.dtype)
    return query, key, value, pad(mask, (1, 0), value=mask.dtype is torch.bool)


def _allowed_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU torch's own choice: its kernel takes masks, shared heads and float32."""
    return sdpa_kernel(_FUSED) if device.type == "cuda" else nullcontext()
