"""The models among a rank's training engines, and in what numbers they are kept and computed."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.actor import EngineConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.planning.shapes import ModelShape

_OF_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))

BYTES = {"float32": 4, "bfloat16": 2}
"""Size of a number of the types that a configuration can name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPrecision:
    """How a model is stored, computed and divided."""

    storage_bytes: int
    """Of a stored weight."""

    compute_bytes: int
    """Of a gathered weight and of an activation."""

    reduce_bytes: int
    """Of a gradient that travels between ranks."""

    num_shards: int
    """Ranks that a model's state is divided over."""

    is_sharded: bool
    """FSDP2 gathers blocks; else weights are plain tensors of one rank."""

    has_varlen_attention: bool
    checkpoints_blocks: bool
    needs_entropy_gradient: bool
    chunk_tokens: int

    shares_prompts: bool = True
    """Siblings compute their prompt once."""

    repeats_key_heads: bool = False
    """The padded kernel on CUDA lays out keys and values once for each query head."""

    sums_whole_gradients: bool = False
    """FSDP2: each rank adds up the gradients of all weights until the last micro-batch."""

    lies_on_host: bool = False
    """FSDP2: weights, gradients and moments stay in host memory."""

    keeps_gathered: bool = False
    """FSDP2: gathered weights stay from the forward pass to the backward pass."""

    num_prefetched_blocks: int = 0
    """FSDP2: blocks whose weights are asked for ahead of time."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> ModelPrecision:
        """Read the policy's; the reference has them too."""
        needs_cast = config.lora.enabled and config.actor.compute_dtype != "float32"
        return cls._of_engine(config, config.actor, config.cluster.num_ranks, needs_cast=needs_cast)

    @classmethod
    def of_critic(cls, config: ExperimentConfig) -> ModelPrecision:
        """Read the critic's, which may have ranks of its own."""
        return cls._of_engine(config, config.critic, config.num_critic_ranks, needs_cast=False)

    @classmethod
    def _of_engine(
        cls, config: ExperimentConfig, engine: EngineConfig, num_ranks: int, *, needs_cast: bool
    ) -> ModelPrecision:
        model, compute_dtype = config.model, engine.compute_dtype
        is_cuda = config.cluster.device == "cuda"
        has_varlen = is_cuda and compute_dtype == "bfloat16" and model.attention != "padded"
        shares_tokens = engine.engine == "megatron" and config.megatron.context_parallel_size > 1
        options, is_fsdp2 = engine.fsdp2, engine.engine == "fsdp2"
        needs_cast = needs_cast or compute_dtype != model.dtype or options.cpu_offload
        return cls(
            # On megatron-core float32 weights are the optimizer's, and counted there.
            storage_bytes=BYTES[compute_dtype if engine.engine == "megatron" else model.dtype],
            compute_bytes=BYTES[compute_dtype],
            reduce_bytes=BYTES[engine.reduce_dtype],
            num_shards=max(1, num_ranks // options.num_replicas),
            is_sharded=num_ranks > 1 or needs_cast,
            has_varlen_attention=has_varlen,
            shares_prompts=not (has_varlen and shares_tokens),
            repeats_key_heads=is_cuda and not has_varlen,
            checkpoints_blocks=engine.gradient_checkpointing,
            needs_entropy_gradient=config.algorithm.entropy_coefficient > 0,
            chunk_tokens=config.actor.logprob_chunk_tokens,
            sums_whole_gradients=is_fsdp2 and options.reduce_gradients == "last_microbatch",
            lies_on_host=is_fsdp2 and options.cpu_offload,
            keeps_gathered=is_fsdp2 and not options.reshard_after_forward,
            num_prefetched_blocks=options.num_prefetched_blocks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """A and B, in float32, beside linear layers of each block; the layers themselves are frozen."""

    rank: int
    modules: frozenset[str]
    """Adapted layers by the last part of their name."""

    num_block_parameters: int
    """Numbers in A and B of one block with a dense MLP."""

    num_parameters: int
    """Numbers in A and B of all blocks."""

    @classmethod
    def of(cls, lora: LoraConfig, shape: ModelShape) -> AdapterShape:
        """Read it from the section ``lora``, for a model of this shape."""
        modules = frozenset(lora.modules)
        sides = sum(
            outputs + inputs
            for name, (outputs, inputs) in shape.linear_sizes.items()
            if name in modules
        )
        block = lora.rank * sides
        extra = shape.num_layers_with_experts * lora.rank * _extra_sides(modules, shape)
        return cls(
            rank=lora.rank,
            modules=modules,
            num_block_parameters=block,
            num_parameters=shape.num_layers * block + extra,
        )


def _extra_sides(modules: frozenset[str], shape: ModelShape) -> int:
    """Outputs and inputs of a layer's experts, less those of the MLP in whose place they are."""
    if shape.experts is None:
        return 0
    num_experts, width = shape.experts.num_experts, shape.experts.intermediate_size
    each = num_experts * (width + shape.hidden_size)
    return len(modules & _OF_MLP) * (each - shape.intermediate_size - shape.hidden_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A model among the training engines: the actor, its reference, a critic."""

    name: str
    shape: ModelShape

    learns: bool
    """There are gradients and moments: of the adapter if there is one, else of all weights."""

    adapter: AdapterShape | None = None
    has_value_head: bool = False
    """One number of a state in place of the vocabulary's logits; there is no output embedding."""

    @property
    def trains_weights(self) -> bool:
        """The weights themselves learn, not an adapter beside them."""
        return self.learns and self.adapter is None

    @property
    def num_outputs(self) -> int:
        """Columns of the logits; a critic has none."""
        return 0 if self.has_value_head else self.shape.vocab_size

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the blocks."""
        if self.has_value_head:  # embedding, last norm, and the head with its bias
            return self.shape.num_embedding_parameters + 2 * self.shape.hidden_size + 1
        return self.shape.num_root_parameters

    @property
    def num_parameters(self) -> int:
        """Parameters without those of an adapter."""
        return self.shape.num_parameters - self.shape.num_root_parameters + self.num_root_parameters

    @property
    def num_adapter_parameters(self) -> int:
        """Numbers in the adapter; 0 without one."""
        return self.adapter.num_parameters if self.adapter else 0

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        whole = self.num_adapter_parameters if self.adapter else self.num_parameters
        return whole if self.learns else 0


def policy_roles(config: ExperimentConfig, shape: ModelShape) -> tuple[PlannedModel, ...]:
    """List the models beside the critic. With LoRA the reference is the actor without adapter."""
    adapter = AdapterShape.of(config.lora, shape) if config.lora.enabled else None
    actor = PlannedModel(name="actor", shape=shape, learns=True, adapter=adapter)
    if config.algorithm.kl.placement == "none" or adapter is not None:
        return (actor,)
    return actor, PlannedModel(name="reference", shape=shape, learns=False)


def critic_role(shape: ModelShape) -> PlannedModel:
    """Describe the critic: the policy's model with a value head."""
    return PlannedModel(name="critic", shape=shape, learns=True, has_value_head=True)
