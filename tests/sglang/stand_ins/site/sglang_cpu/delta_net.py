"""The gated delta rule of Qwen3.5 and Qwen3-Next, whose operators SGLang has for AMX alone."""

from __future__ import annotations

import sgl_kernel.mamba
import sglang.kernels.ops.attention.fla.fused_norm_gate as fused_norm_gate
import sglang.kernels.ops.attention.fla.layernorm_gated as layernorm_gated
import torch
from torch import Tensor


def install() -> None:
    """Put the operators where SGLang looks for its own."""
    for name in dir(sgl_kernel.mamba):
        if name.endswith("_cpu"):
            setattr(torch.ops.sgl_kernel, name, getattr(sgl_kernel.mamba, name))
    layernorm_gated.RMSNorm.forward = _gated_norm
    fused_norm_gate._use_cpu = True


def _gated_norm(self: layernorm_gated.RMSNorm, x: Tensor, z: Tensor) -> Tensor:
    assert self.bias is None and self.group_size is None and self.norm_before_gate
    size = x.shape[-1]
    rows = (x.reshape(-1, size), z.reshape(-1, size))
    return sgl_kernel.mamba.fused_rmsnorm_gated_cpu(rows[0], self.weight, rows[1], self.eps).view(
        x.shape
    )
