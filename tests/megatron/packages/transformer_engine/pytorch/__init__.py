"""Modules with TransformerEngine's parameters and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from transformer_engine.pytorch import distributed, fp8, ops, tensor

__all__ = ["distributed", "fp8", "ops", "tensor"]


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        params_dtype: torch.dtype,
        device: Any,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
    ) -> None:
        super().__init__()
        assert not (sequence_parallel or zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
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
        **_: object,
    ) -> None:
        super().__init__()
        assert tp_size == 1
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
        if self.return_bias:
            return functional.linear(states, self.weight), self.bias
        return functional.linear(states, self.weight, self.bias)


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
        **_: object,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        assert not bias
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
                functional.linear(part, self.get_parameter(f"weight{number}"))
                for number, part in enumerate(parts)
            ]
        )


class DotProductAttention(nn.Module):
    """Stands in a specification, and is replaced before it is built."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError


class Fp8Padding(nn.Module):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


class Fp8Unpadding(Fp8Padding): ...
