"""The part ``fsdp2`` of the sections ``actor`` and ``critic``: what PyTorch's FSDP2 offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Count, CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Config:
    """How FSDP2 divides, moves and computes a model. Other engines do not read it."""

    reduce_gradients: Literal["every_microbatch", "last_microbatch"]
    """When ranks exchange gradients: after every micro-batch, which keeps no more than this rank's
    share of them; or once a step, which sends less and keeps the whole model's on every rank."""

    num_replicas: Count
    """Copies of the model's state, each divided over an equal part of the ranks (HSDP); 1 divides
    it over all. Divides the number of ranks."""

    cpu_offload: bool
    """Keep weights, gradients and moments in host memory, and take the optimizer step there; the
    device holds what is being computed."""

    reshard_after_forward: bool
    """Free gathered weights after the forward pass and gather them again in the backward pass.
    False keeps the whole model gathered meanwhile: faster, if it fits."""

    num_prefetched_blocks: CountOrZero
    """Blocks whose weights are gathered ahead of the one that computes, in either direction. 0
    leaves it to FSDP2, which issues the gather of one block behind the computation before it."""

    compile_blocks: bool
    """Compile each block with ``torch.compile``; its attention stays as it is."""

    liger_kernels: bool
    """Compute norms, rotary embedding and MLP with Liger's fused kernels. CUDA alone."""
