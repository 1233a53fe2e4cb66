"""Modules with TransformerEngine's parameters and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from transformer_engine.pytorch import distributed, fp8, ops, tensor

__all__ = ["distributed", "fp8", "ops", "tensor"]


class _SumIntoWeight(torch.autograd.Function):
    """A product that adds the weight's gradient to ``main_grad``, and gives autograd a dummy."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.main_grad = weight.main_grad if weight.requires_grad else None  # type: ignore[attr-defined]
        ctx.weight = weight
        return functional.linear(states, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        states, weight = ctx.saved_tensors
        grad_states = grads[0] @ weight
        if ctx.main_grad is None:
            return grad_states, None
        ctx.main_grad += (grads[0].flatten(0, -2).T @ states.flatten(0, -2)).to(ctx.main_grad.dtype)
        ctx.weight.grad_added_to_main_grad = True
        return grad_states, torch.full_like(weight, torch.nan)  # what nobody may add


def _multiply(states: Tensor, weight: Tensor, *, sums: bool) -> Tensor:
    if sums and torch.is_grad_enabled():
        product: Tensor = _SumIntoWeight.apply(states, weight)
        return product
    return functional.linear(states, weight)


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int = 0,
        *,
        normalized_shape: int = 0,  # its name since megatron-core 0.17
        eps: float,
        params_dtype: torch.dtype,
        device: Any,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
    ) -> None:
        super().__init__()
        assert not (sequence_parallel or zero_centered_gamma)
        self.weight = nn.Parameter(
            torch.ones(hidden_size or normalized_shape, dtype=params_dtype, device=device)
        )
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weight, self.eps)


class LayerNorm(RMSNorm):
    def forward(self, states: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype,
        device: Any,
        tp_size: int,
        fuse_wgrad_accumulation: bool = False,
        **_: object,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        size = (out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        self.return_bias = return_bias
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        # As TransformerEngine does, whatever number of ranks there is.
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, states: Tensor, is_first_microbatch: bool | None = None) -> Any:
        product = _multiply(states, self.weight, sums=self.fuse_wgrad_accumulation)
        if self.return_bias:
            return product, self.bias
        return product if self.bias is None else product + self.bias


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, eps: float, normalization: str, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        assert normalization == "RMSNorm"
        ones = torch.ones(in_features, dtype=kwargs["params_dtype"], device=kwargs["device"])
        self.layer_norm_weight = nn.Parameter(ones)
        self.eps = eps

    def forward(self, states: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = functional.rms_norm(states, states.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        device: Any,
        tp_size: int,
        fuse_wgrad_accumulation: bool = False,
        **_: object,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        assert not bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            weight = torch.zeros(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{number}", nn.Parameter(weight))

    def forward(
        self, states: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:
        parts = states.split(m_splits)
        return torch.cat(
            [
                _multiply(
                    part, self.get_parameter(f"weight{number}"), sums=self.fuse_wgrad_accumulation
                )
                for number, part in enumerate(parts)
            ]
        )


class DotProductAttention(nn.Module):
    """Attends row by row, in the format ``thd`` alone."""

    num_calls = 0

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        tp_size: int,
        softmax_scale: float | None,
        **kwargs: object,
    ) -> None:
        super().__init__()
        assert not kwargs.keys() & {"cp_group", "window_size"}
        assert attention_dropout == 0
        assert softmax_scale is None
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.kv_channels = kv_channels

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_mask_type: str,
    ) -> Tensor:
        assert qkv_format == "thd"
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert query.shape[1:] == (self.heads[0], self.kv_channels)
        assert key.shape[1:] == value.shape[1:] == (self.heads[1], self.kv_channels)
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        assert int(cu_seqlens_kv.diff().max()) == max_seqlen_kv
        is_aligned_to_last = attn_mask_type == "padding_causal_bottom_right"
        assert is_aligned_to_last or attn_mask_type == "padding_causal"
        DotProductAttention.num_calls += 1
        rows = []
        sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
        for one, keys, values in zip(
            query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True
        ):
            shift = len(keys) - len(one) if is_aligned_to_last else 0
            is_seen = torch.ones(len(one), len(keys), dtype=torch.bool).tril(shift)
            states = [x.transpose(0, 1)[None] for x in (one, keys, values)]
            attended = functional.scaled_dot_product_attention(
                states[0], states[1], states[2], attn_mask=is_seen, enable_gqa=True
            )
            rows.append(attended[0].transpose(0, 1))
        return torch.cat(rows).flatten(1)


class Fp8Padding(nn.Module):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class Fp8Unpadding(Fp8Padding): ...
