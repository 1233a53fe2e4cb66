"""Float32 matrix products on a CPU by oneDNN, where MKL leaves half of the vector unit idle.

torch multiplies float32 matrices by MKL, which uses AVX-512 only on Intel's processors. oneDNN, a
part of torch, uses it on every processor that has it: 190 instead of 95 GFLOP/s on one core of an
AMD EPYC of the 4th generation. Weights are not copied into another format.

Legend: T tokens, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_PRODUCTS = 1 << 20
"""Multiplications below which MKL is as fast: a call of oneDNN costs some 10 us."""


@cache
def is_faster() -> bool:
    """Whether oneDNN is faster than MKL on this processor."""
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_avx512 and has_onednn and not is_intel


def linear(inputs_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``inputs @ weight.T + bias``, [T, O], without a gradient.

    Types, sizes and the processor decide which library multiplies; they differ in rounding.
    """
    if not _is_for_onednn(inputs_TI, weight_OI):
        return F.linear(inputs_TI, weight_OI, bias_O)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        inputs_TI, weight_OI, bias_O, "none", [], ""
    )
    return product


def _is_for_onednn(inputs_TI: Tensor, weight_OI: Tensor) -> bool:
    return (
        inputs_TI.dtype is weight_OI.dtype is torch.float32
        and inputs_TI.is_cpu
        and inputs_TI.numel() * len(weight_OI) >= _FEWEST_PRODUCTS
        and is_faster()
    )


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model multiply by ``linear``, forward and backward."""
    if not is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies by ``linear``, in the backward pass too."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: float [..., I] to [..., O]."""
        if torch.compiler.is_compiling() or not _is_for_onednn(input, self.weight):
            return super().forward(input)
        output_TO: Tensor = _OneDNNProduct.apply(  # type: ignore[no-untyped-call]
            input.reshape(-1, self.in_features), self.weight, self.bias
        )
        return output_TO.view(*input.shape[:-1], self.out_features)


class _OneDNNProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
    ) -> Tensor:
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        # A frozen weight's inputs are not kept, as torch keeps none.
        ctx.save_for_backward(
            inputs_TI if needs_weight else None, weight_OI if needs_inputs else None
        )
        return linear(inputs_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs_TI, weight_OI = ctx.saved_tensors
        (grad_TO,) = grads
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(grad_TO, weight_OI.T) if needs_inputs else None,
            linear(grad_TO.T, inputs_TI.T) if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
        )
