"""What SGLang runs first in each process of a server, as its plug-in ``cpu_stand_ins``."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

from sglang_cpu import delta_net, latent_attention, sinks, without_cuda

BEFORE_OTHER_PROCESSES = "sglang.srt.entrypoints.engine._set_envs_and_config"
BATCH_INVARIANT_KERNELS = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
SHARED_EXPERT = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"


def install() -> None:
    """Answer for CUDA where nothing else can, and let requests have seeds of their own.

    SGLang heeds ``sampling_seed`` with ``--enable-deterministic-inference`` alone, which it refuses
    for the one attention that a CPU has, and for which it would put Triton kernels in the place of
    torch's. Torch's stay: with equal seeds, tokens differ only where a random number falls within
    the rounding by which a logit depends on its batch.
    """
    without_cuda.install()
    torch.compiler.set_stance(
        "force_eager"
    )  # compiling for a CPU needs a C++ compiler, and minutes
    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(BEFORE_OTHER_PROCESSES, _fork_them, HookType.AROUND)
    HookRegistry.register(BATCH_INVARIANT_KERNELS, _keep_the_kernels_of_torch, HookType.REPLACE)
    HookRegistry.register(SHARED_EXPERT, _add_shared_expert, HookType.REPLACE)
    sinks.install()
    delta_net.install()
    latent_attention.install()


def _fork_them(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    """Let scheduler and detokenizer share what the server has imported: half of a start.

    SGLang spawns them, as CUDA must; each would import torch and SGLang anew, for 10 s of CPU.
    """
    original(*args, **kwargs)
    multiprocessing.set_start_method("fork", force=True)


def _keep_the_kernels_of_torch(*, enable_bmm: bool = True) -> None:
    del enable_bmm


def _add_shared_expert(
    hidden_TH: torch.Tensor, gate_H: torch.Tensor, shared_TH: torch.Tensor, sum_TH: torch.Tensor
) -> None:
    """Add the shared expert of Qwen2-MoE to ``sum_TH``, as a Triton kernel of SGLang does."""
    gate_T1 = torch.sigmoid((hidden_TH.float() * gate_H.float()).sum(dim=1, keepdim=True))
    sum_TH.copy_(sum_TH.float() + gate_T1 * shared_TH.float())
