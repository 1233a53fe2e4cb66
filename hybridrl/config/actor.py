"""The sections ``actor`` and ``critic``, and the keys that any training engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import (
    Count,
    CountOrZero,
    Epochs,
    NotNegative,
    PackedTokens,
    Ranks,
    RanksOrZero,
    Rows,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0.0, le=1.0, examples=[1e-6])]
    """Peak learning rate."""

    beta1: Annotated[float, Field(ge=0.0, lt=1.0, examples=[0.9])]
    """Decay of the first moment."""

    beta2: Annotated[float, Field(ge=0.0, lt=1.0, examples=[0.999])]
    """Decay of the second moment."""

    eps: Annotated[float, Field(ge=1e-30, le=1.0, examples=[1e-8])]
    """Added to the root of the second moment; a smaller value would be 0 in float32: 0 / 0."""

    weight_decay: NotNegative
    """Decoupled weight decay; not applied to vectors (norms, biases)."""

    max_grad_norm: Annotated[float, Field(gt=0.0, le=1e9, examples=[1.0])]
    """Global L2 norm to which gradients are clipped."""

    schedule: Literal["constant", "linear", "cosine"]
    """Shape after warm-up. Linear and cosine reach ``min_lr_ratio`` one step after the last step of
    the run: so the last step learns even with a ratio of 0."""

    num_warmup_steps: CountOrZero
    """Optimizer steps over which lr rises linearly from 0; fewer than the steps of the run."""

    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    """Learning rate at the end of the schedule, divided by the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Config:
    """How FSDP2 divides, moves and computes a model. Other engines do not read it."""

    num_replicas: Count = 1
    """Copies of the model's state; each is divided over an equal number of ranks (HSDP). 1 divides
    it over all ranks. Divides the number of ranks."""

    context_parallel_size: Ranks = 1
    """Neighbouring ranks that share the tokens of each row, and in attention its heads: for rows
    too long for one rank. They also share the max_tokens_per_microbatch of a micro-batch. Divides
    the number of ranks; their weights are divided over all ranks as before."""

    cpu_offload: bool = False
    """Keep weights, gradients and moments in host memory, and take the optimizer step there; the
    device holds only the blocks that compute."""

    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass and gather them again in the backward pass.
    False keeps all weights gathered in between: faster, if they fit."""

    kernels: Literal["eager", "compiled", "liger"] = "eager"
    """Kernels of a block: those of transformers, or ``compiled`` by ``torch.compile`` except for
    its attention, or ``liger``: Liger's for norms, rotary embedding and MLP, on CUDA alone."""


ModelKind = Literal["policy", "critic", "reward_model"]
"""A policy, or a value model, that a training engine makes of a folder. The head of a critic begins
as zeros, that of a reward model as it is in the folder, if it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """How the policy is trained, and the critic but for its learning rate. Mirrors
    hydra_configs/actor/*.yaml key by key."""

    engine: Literal["fsdp2", "megatron"]
    """Training engine: PyTorch's FSDP2, or megatron-core with the sizes of section ``megatron``."""

    max_tokens_per_microbatch: PackedTokens
    """Packed tokens per forward pass and rank; a single longer row still runs, on its own. While a
    vision tower learns, images count by their patches, four to a token."""

    compute_dtype: Literal["float32", "bfloat16"]
    """Type of activations and gathered parameters."""

    gradient_checkpointing: bool
    """Recompute each block in the backward pass: less memory, about a third more time."""

    fsdp2: FSDP2Config
    """Read by ``engine=fsdp2`` alone."""

    optimizer: OptimizerConfig
    """AdamW and its schedule."""

    logprob_chunk_tokens: PackedTokens
    """Tokens whose logits are in memory at one time, in float32."""

    replay_routing: bool
    """Route each token of the policy through the experts that SGLang chose for it, which returns
    them with each response. The reference and the critic choose their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticOptimizerConfig:
    """The critic's own settings of an optimizer; the others are those of ``actor.optimizer``."""

    lr: Annotated[float, Field(gt=0.0, le=1.0, examples=[1e-5])]
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """How the critic is trained, and on which processes. Mirrors hydra_configs/critic/*.yaml.

    The critic starts as the policy's model; a value head of zeros replaces the output embedding.
    Its engine, number types, micro-batches and optimizer are those of section ``actor``.
    """

    optimizer: CriticOptimizerConfig
    """The rest of it is ``actor.optimizer``, over the critic's own steps."""

    num_warmup_steps: Annotated[int, Field(ge=0, le=10**8)]
    """First steps of the run, in which only the critic learns and the policy does not change."""

    num_epochs: Epochs
    """Passes over each rollout batch."""

    num_minibatches: Rows
    """Optimizer steps per pass; divides the rows of a step."""

    value_clip: NotNegative
    """A value may move this far, in reward units, from its value before the step; beyond, its loss
    is clipped (PPO2). 0 is off."""

    num_ranks_per_node: RanksOrZero
    """Worker processes of its own per machine, in addition to the cluster's, which compute at the
    same time. 0: it shares processes and devices with the policy."""

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_epochs * self.num_minibatches
