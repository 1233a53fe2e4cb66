"""Memory of a model that trains or scores, on one rank: one formula for both engines.

For FSDP2 the split is one, and its ranks divide the weights. megatron-core keeps float32 master
weights and flat gradient buffers. ``docs/memory.md`` derives the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.config.actor import EngineConfig
from hybridrl.config.architecture import Architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.planning.split import Parameters, Split
from hybridrl.planning.workload import Microbatch

BYTES = {"float32": 4, "bfloat16": 2}
"""Size of a number of each type that a configuration can name."""

_FLOAT32 = 4


@dataclass(frozen=True)  # without slots: sizes are computed once
class ModelMemory:
    """Bytes of one model on one rank. Sizes that depend on rows are for one micro-batch."""

    config: ExperimentConfig
    name: str
    """actor, reference, teacher or critic."""

    architecture: Architecture
    stage: int = 0
    """Pipeline stage, from 0; 0 without a pipeline."""

    # -- facts -----------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineConfig:
        """The configuration section of the engine that trains it."""
        return self.config.critic if self.has_value_head else self.config.actor

    @property
    def is_megatron(self) -> bool:
        """Whether megatron-core trains it, instead of FSDP2."""
        return self.engine.engine == "megatron"

    @property
    def has_value_head(self) -> bool:
        """One number per state replaces the vocabulary's logits and the output embedding."""
        return self.name == "critic"

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter beside frozen weights; with an adapter nothing else learns."""
        lora = self.config.lora
        return lora if lora.enabled and self.name == "actor" else None

    @property
    def trains_weights(self) -> bool:
        """Whether the weights themselves learn, instead of an adapter beside them."""
        return self.name in ("actor", "critic") and self.adapter is None

    @property
    def num_ranks(self) -> int:
        """Ranks that train it; a critic may have a pool of its own."""
        config = self.config
        return config.num_critic_ranks if self.has_value_head else config.cluster.num_ranks

    @cached_property
    def split(self) -> Split:
        """How ranks split it. FSDP2: over the ranks of a replica."""
        if self.is_megatron:
            return Split.of_megatron(self.config, num_ranks=self.num_ranks, stage=self.stage)
        return Split(num_ranks=max(1, self.num_ranks // self.engine.fsdp2.num_replicas))

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters on this rank, or of FSDP2's replica, without those of an adapter."""
        return self.split.count(self.architecture, has_value_head=self.has_value_head)

    @cached_property
    def adapter_parameters(self) -> Parameters:
        """Numbers of the adapter, counted alike; 0 without an adapter."""
        return self.split.count_adapter(self.architecture, self.adapter) if self.adapter else _NONE

    @property
    def trained(self) -> Parameters:
        """Numbers that have gradients and moments."""
        return self.parameters if self.trains_weights else self.adapter_parameters

    @property
    def compute_bytes(self) -> int:
        """Size of a number of a gathered weight, and of an activation."""
        return BYTES[self.engine.compute_dtype]

    @property
    def storage_bytes(self) -> int:
        """Size of a number of a stored weight. megatron-core's float32 copy is the optimizer's."""
        return self.compute_bytes if self.is_megatron else BYTES[self.config.model.dtype]

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers blocks; otherwise weights are plain tensors of one rank."""
        adapts = self.config.lora.enabled and not self.has_value_head
        needs_cast = self.engine.compute_dtype != self.config.model.dtype
        needs_cast |= adapts and self.engine.compute_dtype != "float32"
        return self.num_ranks > 1 or needs_cast or self.engine.fsdp2.cpu_offload

    @property
    def lies_on_host(self) -> bool:
        """FSDP2: weights, gradients and moments stay in host memory."""
        return not self.is_megatron and self.engine.fsdp2.cpu_offload

    @property
    def has_varlen_attention(self) -> bool:
        """Whether attention reads packed rows as they are; otherwise it pads them."""
        is_half = self.engine.compute_dtype == "bfloat16"
        return self.is_cuda and is_half and self.config.model.attention != "padded"

    @property
    def is_cuda(self) -> bool:
        """A rank computes on a GPU."""
        return self.config.cluster.device == "cuda"

    @property
    def shares_prompts(self) -> bool:
        """Whether responses to one prompt compute the prompt once."""
        shares_tokens = self.is_megatron and self.split.context > 1
        return not (self.has_varlen_attention and shares_tokens)

    # -- state -----------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """This rank's weights as stored, and those of an adapter in float32."""
        base = self._held(self.parameters) * self.storage_bytes
        return base + self._held(self.adapter_parameters) * _FLOAT32

    def _held(self, parameters: Parameters) -> int:
        return parameters.total if self.is_megatron else self.split.share(parameters)

    @property
    def mapped_files(self) -> int:
        """Files from which it is read: FSDP2 maps all of them, megatron-core those of this rank."""
        if self.is_megatron:
            return self.weights
        return self.split.count(self.architecture).total * self.storage_bytes

    @property
    def _master_bytes(self) -> int:
        """Size of a number that the optimizer steps."""
        return _FLOAT32 if self.is_megatron or self.adapter else self.storage_bytes

    @property
    def masters(self) -> int:
        """megatron-core's float32 weights, if the model computes in another type."""
        is_same = self.compute_bytes == _FLOAT32 or self.adapter is not None
        if not self.is_megatron or is_same:
            return 0
        copies = self._offloads and not self._is_precision_aware
        return _FLOAT32 * (self._share if copies else self._stepped_here)

    @property
    def optimizer(self) -> int:
        """Master weights and AdamW's two moments, after the first step."""
        moment_bytes = 2 * self._master_bytes
        if self.is_megatron and self._is_precision_aware and not self._offloads:
            args = self.config.megatron.optimizer_args
            kinds = (args.get("exp_avg_dtype"), args.get("exp_avg_sq_dtype"))
            moment_bytes = sum(4 if kind in (None, "float32") else 2 for kind in kinds)
        return self.masters + moment_bytes * self._stepped_here

    @property
    def host_optimizer(self) -> int:
        """float32 masters, moments, gradients of weights that megatron-core steps on the host."""
        return 4 * _FLOAT32 * (self._share - self._stepped_here)

    @property
    def _share(self) -> int:
        """Numbers whose optimizer state this rank keeps."""
        return self.split.share(self.trained)

    @property
    def _stepped_here(self) -> int:
        """Numbers that are stepped on the device."""
        fraction = self.config.megatron.optimizer_args.get("optimizer_offload_fraction", 1.0)
        on_host = float(fraction) if isinstance(fraction, int | float) else 1.0
        offloads = self.is_megatron and self._offloads
        return self._share - int(self._share * on_host * offloads)

    @property
    def _offloads(self) -> bool:
        return bool(self.config.megatron.optimizer_args.get("optimizer_cpu_offload"))

    @property
    def _is_precision_aware(self) -> bool:
        return bool(self.config.megatron.optimizer_args.get("use_precision_aware_optimizer"))

    @property
    def snapshot(self) -> int:
        """The host copy that a checkpoint writes: weights that learn, and their moments."""
        return 3 * self._master_bytes * self._share

    # -- gradients and gathered weights ----------------------------------------------------------

    @property
    def buffers(self) -> int:
        """megatron-core's flat gradient buffers, which are zeroed after each update."""
        is_float32 = self.compute_bytes == _FLOAT32 or self.adapter is not None
        size = _FLOAT32 if is_float32 else BYTES[self.engine.reduce_dtype]
        return self.is_megatron * self.trained.total * size

    @property
    def gathered(self) -> int:
        """Weights that FSDP2 holds gathered: the root, the block that computes, prefetched blocks,
        and the buffer for one more block; or all blocks and that buffer."""
        if self.is_megatron or not self.gathers:
            return 0
        total = self.parameters.total + self.adapter_parameters.total
        if not self.engine.fsdp2.reshard_after_forward:
            held = total + self._block
        else:
            num_blocks = 2 + max(1, self.engine.fsdp2.num_prefetched_blocks)
            held = self._root + num_blocks * self._block
        return min(held, 2 * total) * self.compute_bytes

    @property
    def _root(self) -> int:
        return self.split.count_root(self.architecture, has_value_head=self.has_value_head)

    @property
    def _block(self) -> int:
        """Numbers of the largest block, which FSDP2 gathers and reduces at once."""
        model, num_sparse = self.architecture, self.split.num_sparse(self.architecture)
        kinds = {True} if num_sparse else set()
        kinds |= {False} if num_sparse < model.num_layers else set()
        largest = max(self.split.count_block(model, is_sparse=kind).total for kind in kinds)
        return largest + self.adapter_parameters.total // model.num_layers

    @property
    def _gradients(self) -> int:
        """FSDP2: this rank's share of the gradients."""
        return 0 if self.is_megatron else self._share * self._master_bytes

    @property
    def gradients_on_host(self) -> int:
        """This rank's share of the gradients, if they are in host memory."""
        return self.lies_on_host * self._gradients

    def gradients_before_last(self, microbatch: Microbatch) -> int:
        """Gradients on the device when the last backward pass of an update begins.

        FSDP2 sums this rank's share of them over micro-batches, in the type of the weights. With
        ``reduce_gradients=last_microbatch`` it sums the full gradients, in ``reduce_dtype``.
        """
        if microbatch.is_only_one or self.is_megatron:
            return 0
        if self.gathers and self.engine.fsdp2.reduce_gradients == "last_microbatch":
            return self.trained.total * BYTES[self.engine.reduce_dtype]
        return self._gradients - self.gradients_on_host

    @property
    def gradients_at_end(self) -> int:
        """Gradients on the device when the last backward pass ends.

        FSDP2: this rank's share, and the last gradient before its reduction. megatron-core: the
        largest matrix's gradient, before it is added to the buffer.
        """
        if self.is_megatron:
            largest = self.split.largest_matrix(
                self.architecture, has_value_head=self.has_value_head
            )
            return self.trains_weights * largest * self.compute_bytes
        if not self.gathers:
            return self._gradients
        block = self._block
        if self.adapter:
            leaving = self.adapter_parameters.total // self.architecture.num_layers
        else:
            leaving = max(self._root, block)
        leaving_bytes = 2 * min(leaving, self.trained.total) * BYTES[self.engine.reduce_dtype]
        return self._gradients - self.gradients_on_host + leaving_bytes

    @property
    def embedding_gradient(self) -> int:
        """The output embedding's gradient, which autograd keeps for a tied input embedding.

        In megatron-core both uses add to one buffer.
        """
        has_two_uses = self.architecture.is_tied and not self.has_value_head
        if self.is_megatron or not (self.trains_weights and has_two_uses):
            return 0
        return self.split.count_embedding(self.architecture) * self.compute_bytes

    @cached_property
    def narrow(self) -> Architecture:
        """Heads, columns and vocabulary rows of one tensor-parallel rank."""
        model, size = self.architecture, self.split.tensor
        return replace(
            model,
            num_heads=model.num_heads // size,
            num_key_value_heads=max(1, model.num_key_value_heads // size),
            intermediate_size=model.intermediate_size // size,
            vocab_size=self.split.vocabulary(model),
        )


_NONE = Parameters()
