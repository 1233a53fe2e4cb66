"""Memory of the models that train on megatron-core, on one rank.

Follows ``training.py``, for the part of the model that a rank has. Legend: T packed tokens, H
hidden, I inside an MLP, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.planning.megatron_cut import Cut, Parameters
from hybridrl.planning.roles import ModelPrecision, PlannedModel
from hybridrl.planning.training import TrainingMemory
from hybridrl.planning.workload import Microbatch

_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32
_ROUTER_COPIES = 3  # logits, probabilities and which experts were chosen, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHome:
    """Where masters and moments lie, as ``megatron.optimizer_args`` say."""

    share_on_host: float = 0.0
    """Of what a rank steps: its masters, moments and gradients are on the host."""

    moment_bytes: int = _MOMENTS
    """Of both moments of a number that is stepped on the device."""

    copies_masters: bool = False
    """The device has a master too of what is stepped on the host."""

    @classmethod
    def of(cls, args: Mapping[str, ArgumentValue]) -> Self:
        """Read the section's further arguments."""
        is_aware = bool(args.get("use_precision_aware_optimizer"))
        if args.get("optimizer_cpu_offload"):
            fraction = args.get("optimizer_offload_fraction", 1.0)
            share = float(fraction) if isinstance(fraction, int | float) else 1.0
            return cls(share_on_host=share, copies_masters=not is_aware)
        if not is_aware:
            return cls()
        kinds = (args.get("exp_avg_dtype"), args.get("exp_avg_sq_dtype"))
        sizes = (_FLOAT32 if kind in (None, "float32") else _FLOAT32 // 2 for kind in kinds)
        return cls(moment_bytes=sum(sizes))


@dataclass(frozen=True)  # without slots: sizes are computed once
class MegatronMemory:
    """Bytes of one role on one rank of a pipeline stage."""

    role: PlannedModel
    numerics: ModelPrecision
    cut: Cut
    home: OptimizerHome = OptimizerHome()

    @classmethod
    def of(
        cls, config: ExperimentConfig, role: PlannedModel, numerics: ModelPrecision, *, stage: int
    ) -> MegatronMemory:
        """Read how the model is cut; a critic may have ranks of its own."""
        num_ranks = config.num_critic_ranks if role.has_value_head else config.cluster.num_ranks
        if config.megatron.recompute_modules:
            # What of a block is recomputed is not taken off: an upper bound.
            numerics = replace(numerics, checkpoints_blocks=False)
        cut = Cut.of(config.megatron, num_ranks=num_ranks, stage=stage)
        return cls(role, numerics, cut, OptimizerHome.of(config.megatron.optimizer_args))

    # -- state -----------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """This rank's part of the weights, as it computes with them; an adapter's in float32."""
        base = self.parameters.here * self.numerics.compute_bytes
        return base + self.adapter_parameters.here * _FLOAT32

    @property
    def mapped_files(self) -> int:
        """This rank's part of the files: it reads no more of them."""
        return self.weights

    @property
    def masters(self) -> int:
        """float32 weights, of which a data-parallel rank keeps its share.

        Weights that are float32 themselves, as an adapter's, have no other copy.
        """
        is_itself = self.numerics.compute_bytes == _FLOAT32 or self.role.adapter is not None
        num_stepped = self._trained.share if self.home.copies_masters else self._stepped_here
        return 0 if is_itself else _FLOAT32 * num_stepped

    @property
    def optimizer(self) -> int:
        """Masters and AdamW's two moments, in float32: a share of each data-parallel rank."""
        return self.masters + self.home.moment_bytes * self._stepped_here

    @property
    def host_optimizer(self) -> int:
        """Masters, moments and gradients of what is stepped on the host, in float32."""
        return (2 * _FLOAT32 + _MOMENTS) * (self._trained.share - self._stepped_here)

    @property
    def _stepped_here(self) -> int:
        """Count the numbers that are stepped on the device."""
        share = self._trained.share
        return share - int(share * self.home.share_on_host)

    @property
    def buffers(self) -> int:
        """Gradients of this rank's part, in flat buffers that are emptied after each update."""
        is_float32 = self.numerics.compute_bytes == _FLOAT32 or self.role.adapter is not None
        size = _FLOAT32 if is_float32 else self.numerics.reduce_bytes
        return self._trained.here * size

    @property
    def gradients_on_host(self) -> int:
        """None: the buffers lie on the device."""
        return 0

    @property
    def snapshot(self) -> int:
        """What a checkpoint copies to the host: float32 weights that learn, and their moments."""
        return (_FLOAT32 + _MOMENTS) * self._trained.share

    @property
    def gathered(self) -> int:
        """Nothing: gathered weights arrive where they stay."""
        return 0

    def gradients_before_last(self, _microbatch: Microbatch) -> int:
        """Nothing beside the buffers."""
        return 0

    def gradients_at_end(self, _microbatch: Microbatch) -> int:
        """The largest matrix's gradient, on its way into the buffer."""
        if not self.role.trains_weights:
            return 0
        return self.cut.largest_matrix(self.role) * self.numerics.compute_bytes

    def embedding_gradient(self) -> int:
        """Nothing: both uses of a tied embedding add to one buffer."""
        return 0

    # -- activations -----------------------------------------------------------------------------

    def saved_by_block(self, microbatch: Microbatch) -> int:
        """What autograd keeps of the forward pass of this stage's largest block."""
        return max(self._saved(microbatch, has_experts=kind) for kind in self._kinds)

    def activations(self, microbatch: Microbatch) -> int:
        """Everything that autograd keeps of the micro-batches between forward and backward."""
        local = self._local(microbatch)
        stream = self._stream(local)
        if self.numerics.checkpoints_blocks:
            blocks = len(self.cut.layers_of(self.role.shape)) * stream
        else:
            counts = {True: self._num_sparse, False: self._num_dense}
            blocks = sum(
                counts[kind] * self._saved(microbatch, has_experts=kind) for kind in self._kinds
            )
        # What a stage received is kept beside what its blocks keep.
        in_flight = self.cut.in_flight(microbatch.num_microbatches)
        kept = int(in_flight * (blocks + stream * (self.cut.pipeline > 1)))
        if self.numerics.checkpoints_blocks:
            kept += self.saved_by_block(microbatch)
        return kept + self.cut.is_last * self._saved_by_head(local)

    def _saved_by_head(self, local: Microbatch) -> int:
        hidden, size = self.role.shape.hidden_size, self.numerics.compute_bytes
        kept_for_weights = 0 if self.role.adapter else size
        last_norm = local.num_tokens * hidden * (_FLOAT32 + kept_for_weights) // self.cut.sequence
        scored = _FLOAT32 if self.role.has_value_head else size
        return last_norm + local.num_scored * hidden * scored

    def passing(self, microbatch: Microbatch) -> int:
        """What exists only while one block computes, in either direction."""
        local = self._local(microbatch)
        return max(
            self._slice.passing(local),
            self._expert_numbers(local, of_width=3, of_hidden=2) * self.numerics.compute_bytes,
        )

    def logits_forward(self, microbatch: Microbatch) -> int:
        """One chunk's logits, probabilities and their product, of this rank's words."""
        return self.cut.is_last * self._slice.logits_forward(self._local(microbatch))

    def logits_backward(self, microbatch: Microbatch) -> int:
        """One chunk's logits again, their slopes, and the gradient of the output embedding."""
        return self.cut.is_last * self._slice.logits_backward(self._local(microbatch))

    def _saved(self, microbatch: Microbatch, *, has_experts: bool) -> int:
        local, kept = self._local(microbatch), self._slice
        total = local.num_tokens * kept.stream_per_token // self.cut.sequence
        total += local.num_tokens * (kept.head_norms_per_token + kept.adapter_per_token)
        total += local.num_tokens * self._by_fused_layers * self.numerics.compute_bytes
        total += kept.saved_by_attention(local)
        total += local.num_tokens * self._gathered_heads * self.numerics.compute_bytes
        if has_experts:
            return total + self._saved_by_experts(local)
        product = kept.role.shape.intermediate_size * self.numerics.compute_bytes
        return total + local.num_tokens * (kept.mlp_per_token + product)

    @property
    def _by_fused_layers(self) -> int:
        """Count what megatron-core keeps beside what a Hugging Face layer does, per token.

        Cosine and sine of a head's rotation, for queries and keys; and with norms of heads the
        whole of a fused projection, of which the norm of keys has seen a part.
        """
        shape = self._slice.role.shape
        rotation = 4 * shape.head_size
        return rotation + shape.has_head_norms * (shape.query_size + shape.key_size)

    @property
    def _gathered_heads(self) -> int:
        """Count what ranks gather, per token, that have less than a whole key-value head each."""
        shape = self.role.shape
        if self.cut.tensor <= shape.num_key_value_heads:
            return 0
        return shape.query_size + 2 * shape.key_size

    def _saved_by_experts(self, local: Microbatch) -> int:
        """Tokens as sent to experts and as they come back, and what experts keep inside.

        Every expert is taken to get as many tokens as another.
        """
        experts = self.role.shape.experts
        if experts is None:
            return 0
        numbers = self._expert_numbers(local, of_width=5, of_hidden=2)
        router = local.num_tokens // self.cut.sequence * experts.num_experts
        return numbers * self.numerics.compute_bytes + router * _ROUTER_COPIES * _FLOAT32

    def _expert_numbers(self, local: Microbatch, *, of_width: int, of_hidden: int) -> int:
        """Count numbers per (token, expert) pair: so many inside the expert, so many outside.

        Ranks that share an expert's matrices have each other's tokens, and a part of each inside.
        """
        experts = self.role.shape.experts
        if experts is None or not self._num_sparse:
            return 0
        pairs = local.num_tokens * experts.num_per_token // self.cut.sequence
        outside = of_hidden * self.cut.expert_tensor * self.role.shape.hidden_size
        return pairs * (of_width * experts.intermediate_size + outside)

    def _stream(self, local: Microbatch) -> int:
        numbers = local.num_tokens * self.role.shape.hidden_size
        return numbers * self.numerics.compute_bytes // self.cut.sequence

    def _local(self, microbatch: Microbatch) -> Microbatch:
        """Return the tokens that this rank has of a row that context-parallel ranks share.

        Keys and values are gathered: it keeps them of all.
        """
        size = self.cut.context
        return replace(
            microbatch,
            num_tokens=-(-microbatch.num_tokens // size),
            num_scored=-(-microbatch.num_scored // size),
        )

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters of this rank, without those of an adapter."""
        return self.cut.parameters(self.role)

    @cached_property
    def adapter_parameters(self) -> Parameters:
        """Numbers of this rank's part of the adapter; none without one."""
        return self.cut.adapter_parameters(self.role)

    @property
    def _trained(self) -> Parameters:
        if not self.role.learns:
            return self.cut.none
        return self.adapter_parameters if self.role.adapter else self.parameters

    @cached_property
    def _slice(self) -> TrainingMemory:
        """The formulas of ``training.py``, for a model as narrow as a tensor-parallel rank's."""
        shape, size = self.role.shape, self.cut.tensor
        narrow = replace(
            shape,
            num_heads=shape.num_heads // size,
            num_key_value_heads=max(1, shape.num_key_value_heads // size),
            intermediate_size=shape.intermediate_size // size,
            vocab_size=self.cut.padded_words(shape.vocab_size) // size,
        )
        return TrainingMemory(replace(self.role, shape=narrow), self.numerics)

    @property
    def _num_sparse(self) -> int:
        return self.cut.num_sparse(self.role.shape)

    @property
    def _num_dense(self) -> int:
        return len(self.cut.layers_of(self.role.shape)) - self._num_sparse

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Whether blocks of this stage have experts, each kind that there is."""
        return tuple(k for k, n in ((True, self._num_sparse), (False, self._num_dense)) if n)
