"""The stand-in for TransformerEngine (tests/megatron/packages), divided over tensor-parallel ranks.

On fake devices: nothing depends on values. megatron-core is imported after ``divide``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def divide() -> None:
    """Change the stand-in that is on the path."""
    modules: Any = import_module("transformer_engine.pytorch")
    _divide_linear(modules.Linear)
    modules.DotProductAttention.forward = _attend
    make_norm = modules.RMSNorm.__init__

    def init(norm: Any, hidden_size: int, *, sequence_parallel: bool, **kwargs: Any) -> None:
        make_norm(norm, hidden_size, sequence_parallel=False, **kwargs)

    modules.RMSNorm.__init__ = init
    permutation: Any = import_module("transformer_engine.pytorch.permutation")
    permutation.moe_sort_chunks_by_index = lambda inp, *_: inp.clone()
    permutation.moe_sort_chunks_by_index_with_probs = lambda inp, probs, *_: (
        inp.clone(),
        probs.clone(),
    )


def _divide_linear(linear: Any) -> None:
    make, multiply = linear.__init__, linear.forward

    def init(
        layer: Any,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        size = in_features // (tp_size if parallel_mode == "row" else 1)
        num_out = out_features // (tp_size if parallel_mode == "column" else 1)
        make(layer, size, num_out, tp_size=1, **kwargs)
        layer.mode = parallel_mode if tp_size > 1 else None
        layer.is_sequence_divided = sequence_parallel

    def forward(layer: Any, states: Tensor, is_first_microbatch: bool | None = None) -> Any:
        parallel = import_module("megatron.core.tensor_parallel.mappings")
        if layer.mode == "column" and layer.is_sequence_divided:
            states = parallel.gather_from_sequence_parallel_region(states)
        elif layer.mode == "column":
            states = parallel.copy_to_tensor_model_parallel_region(states)
        product = multiply(layer, states, is_first_microbatch)
        if layer.mode != "row":
            return product
        product, bias = product if layer.return_bias else (product, None)
        if layer.is_sequence_divided:
            product = parallel.reduce_scatter_to_sequence_parallel_region(product)
        else:
            product = parallel.reduce_from_tensor_model_parallel_region(product)
        return (product, bias) if layer.return_bias else product

    linear.__init__, linear.forward = init, forward


def _attend(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    **_: object,
) -> Tensor:
    offsets = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    is_causal, returns_mask = True, False
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *offsets, 0.0, is_causal, returns_mask
    )[0]
    return attended.flatten(1)
