"""The ``actor`` section, and what any training engine is told: the critic's too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.fsdp2 import FSDP2Config
from hybridrl.config.limits import CountOrZero, NotNegative, PackedTokens, Within


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Within(above=0.0, at_most=1.0, usual=1e-6)]
    """Peak learning rate."""

    beta1: Annotated[float, Within(at_least=0.0, below=1.0, usual=0.9)]
    """Decay of the first moment."""

    beta2: Annotated[float, Within(at_least=0.0, below=1.0, usual=0.999)]
    """Decay of the second moment."""

    eps: Annotated[float, Within(at_least=1e-30, at_most=1.0, usual=1e-8)]
    """Added to the root of the second moment; a smaller one would be 0 in float32, and 0 / 0."""

    weight_decay: NotNegative
    """Decoupled weight decay; not applied to vectors (norms, biases)."""

    max_grad_norm: Annotated[
        float, Within(above=0.0, at_most=1e9, usual=1.0, why="it clips nothing any more")
    ]
    """Global L2 norm to which gradients are clipped."""

    schedule: Literal["constant", "linear", "cosine"]
    """Shape after warm-up; linear and cosine reach ``min_lr_ratio`` one step after the run's last,
    so that even with a ratio of 0 the last step learns."""

    num_warmup_steps: CountOrZero
    """Optimizer steps over which lr rises linearly from 0; fewer than the run takes."""

    min_lr_ratio: Annotated[float, Within(at_least=0.0, at_most=1.0)]
    """Where the schedule ends, over the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """A training engine: what actor and critic have in common."""

    engine: Literal["fsdp2", "megatron"]
    """Training engine: PyTorch's FSDP2, or megatron-core cut as the ``megatron`` section says."""

    max_tokens_per_microbatch: PackedTokens
    """Packed tokens per forward pass and rank; a single longer row still runs, alone."""

    compute_dtype: Literal["float32", "bfloat16"]
    """Type of activations and gathered parameters."""

    reduce_dtype: Literal["float32", "bfloat16"]
    """Type in which gradients are summed over ranks."""

    gradient_checkpointing: bool
    """Recompute each block in the backward pass: memory for about a third more time."""

    fsdp2: FSDP2Config
    """Read by ``engine=fsdp2`` alone."""

    optimizer: OptimizerConfig
    """AdamW and its schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(EngineConfig):
    """How the policy is trained. Mirrors hydra_configs/actor/*.yaml key by key."""

    logprob_chunk_tokens: PackedTokens
    """Tokens whose logits exist at one time in float32."""
