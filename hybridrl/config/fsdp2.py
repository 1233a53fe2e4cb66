"""The ``fsdp2`` keys of the sections ``actor`` and ``critic``: the options of PyTorch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Count, CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Config:
    """How FSDP2 divides, moves and computes a model. Other engines do not read it."""

    reduce_gradients: Literal["every_microbatch", "last_microbatch"]
    """When ranks exchange gradients: after every micro-batch, which stores only this rank's share;
    or once a step, which sends less and stores the full model's gradients on every rank."""

    num_replicas: Count
    """Copies of the model's state; each is divided over an equal number of ranks (HSDP). 1 divides
    it over all ranks. Divides the number of ranks."""

    cpu_offload: bool
    """Keep weights, gradients and moments in host memory, and take the optimizer step there; the
    device holds only the blocks that compute."""

    reshard_after_forward: bool
    """Free gathered weights after the forward pass and gather them again in the backward pass.
    False keeps all weights gathered in between: faster, if they fit."""

    num_prefetched_blocks: CountOrZero
    """Blocks whose weights are prefetched ahead of the block that computes, in either direction. 0
    leaves it to FSDP2, which gathers each block during the computation of the one before."""

    compile_blocks: bool
    """Compile each block with ``torch.compile``, except its attention."""

    liger_kernels: bool
    """Compute norms, rotary embedding and MLP with Liger's fused kernels. CUDA alone."""
