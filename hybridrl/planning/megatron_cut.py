"""How megatron-core cuts a model: which of its parameters one rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hybridrl.config.megatron import MegatronConfig
from hybridrl.planning.roles import PlannedModel
from hybridrl.planning.shapes import ModelShape

_WORDS_PER_RANK = 8
"""The vocabulary is padded to a multiple of so many words on each tensor-parallel rank."""

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_OF_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers on one rank. Experts are shared out over other ranks than everything else."""

    dense: int
    expert: int

    dense_shards: int
    """Data-parallel ranks that divide the optimizer's state of ``dense`` among them."""

    expert_shards: int

    @property
    def here(self) -> int:
        """All on this rank."""
        return self.dense + self.expert

    @property
    def share(self) -> int:
        """Those whose optimizer state this rank keeps."""
        return -(-self.dense // self.dense_shards) + -(-self.expert // self.expert_shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Parallel sizes, and the place of one pipeline stage."""

    tensor: int
    pipeline: int
    num_virtual: int
    context: int
    expert: int
    expert_tensor: int

    sequence: int
    """Ranks over which norms and residuals are divided: ``tensor``, or 1."""

    num_ranks: int
    stage: int

    first: int | None = None
    """Layers of the first stage; None is as many as of those in between."""

    last: int | None = None

    @classmethod
    def of(cls, megatron: MegatronConfig, *, num_ranks: int, stage: int) -> Self:
        """Read the section ``megatron``, for one of the stages from 0."""
        return cls(
            tensor=megatron.tensor_parallel_size,
            pipeline=megatron.pipeline_parallel_size,
            num_virtual=megatron.num_virtual_stages,
            context=megatron.context_parallel_size,
            expert=megatron.expert_parallel_size,
            expert_tensor=megatron.expert_tensor_parallel_size,
            sequence=megatron.tensor_parallel_size if megatron.sequence_parallel else 1,
            num_ranks=num_ranks,
            stage=stage,
            first=megatron.num_layers_in_first_stage,
            last=megatron.num_layers_in_last_stage,
        )

    @property
    def is_first(self) -> bool:
        """The stage has the input embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """The stage has the last norm, and the output embedding or the value head."""
        return self.stage == self.pipeline - 1

    @property
    def none(self) -> Parameters:
        """No parameters."""
        return self._counted(0, 0)

    def layers_of(self, shape: ModelShape) -> tuple[int, ...]:
        """Return the stage's layers, from 0: a stretch of each virtual stage."""
        sizes = self._layers_of_chunks(shape.num_layers)
        begin, length = sum(sizes[: self.stage]), sizes[self.stage]
        begins = (chunk * sum(sizes) + begin for chunk in range(self.num_virtual))
        return tuple(layer for begin in begins for layer in range(begin, begin + length))

    def _layers_of_chunks(self, num_layers: int) -> list[int]:
        """Return the layers of one virtual stage of each pipeline rank."""
        ends = (self.first or 0) + (self.last or 0)
        num_between = self.pipeline - (self.first is not None) - (self.last is not None)
        each = max(1, (num_layers - ends) // (max(1, num_between) * self.num_virtual))
        sizes = [each] * self.pipeline
        if self.first is not None:
            sizes[0] = self.first // self.num_virtual
        if self.last is not None:
            sizes[-1] = self.last // self.num_virtual
        return sizes

    def num_sparse(self, shape: ModelShape) -> int:
        """Return how many of the stage's layers have experts."""
        sparse = shape.experts.layers if shape.experts else frozenset()
        return len(sparse.intersection(self.layers_of(shape)))

    def in_flight(self, num_microbatches: int) -> float:
        """Return how many micro-batches of a stage wait for their backward pass at most.

        One forward, one backward (arXiv:2104.04473): stage p of P keeps P - p. With V virtual
        stages the warm-up is 2 (P - p - 1) + (V - 1) P pieces of 1 / V of the stage's layers.
        """
        after = self.pipeline - self.stage - 1
        if self.num_virtual == 1:
            return min(num_microbatches, after + 1)
        pieces = 2 * after + (self.num_virtual - 1) * self.pipeline + 1
        return min(num_microbatches, pieces / self.num_virtual)

    def padded_words(self, vocab_size: int) -> int:
        """Return the rows of the whole embedding, of which each rank has as many."""
        return padded_words(vocab_size, tp_size=self.tensor)

    def parameters(self, role: PlannedModel) -> Parameters:
        """Count a rank's parameters, without those of an adapter."""
        shape, size = role.shape, self.tensor
        hidden, inner = shape.hidden_size, shape.intermediate_size
        num_layers, num_sparse = len(self.layers_of(shape)), self.num_sparse(shape)
        attention = 2 * hidden * (shape.query_size + shape.key_size) // size
        attention += shape.has_qkv_bias * (shape.query_size + 2 * shape.key_size) // size
        norms = 2 * hidden + shape.has_head_norms * 2 * shape.head_size
        block = attention + norms + shape.has_output_bias * hidden
        mlp = 3 * hidden * inner // size + shape.has_mlp_bias * (2 * inner // size + hidden)
        router = expert = 0
        if shape.experts is not None:
            router = hidden * shape.experts.num_experts
            num_of_expert = 3 * hidden * shape.experts.intermediate_size // self.expert_tensor
            expert = shape.experts.num_experts // self.expert * num_of_expert
        dense = num_layers * block + (num_layers - num_sparse) * mlp + num_sparse * router
        return self._counted(dense + self._root(role), num_sparse * expert)

    def _root(self, role: PlannedModel) -> int:
        """Count what lies outside the blocks: embeddings or a value head, and the last norm."""
        hidden = role.shape.hidden_size
        words = self._embedding(role.shape)
        head = hidden + 1 if role.has_value_head else words
        is_shared = role.shape.is_tied and self.is_first and not role.has_value_head
        last = hidden + (0 if is_shared else head)
        return self.is_first * words + self.is_last * last

    def _embedding(self, shape: ModelShape) -> int:
        return self.padded_words(shape.vocab_size) // self.tensor * shape.hidden_size

    def largest_matrix(self, role: PlannedModel) -> int:
        """Count the largest matrix of the stage: its gradient is made in one piece."""
        shape = role.shape
        hidden, num_sparse = shape.hidden_size, self.num_sparse(shape)
        sizes = [2 * hidden * shape.intermediate_size // self.tensor]
        if num_sparse == len(self.layers_of(shape)):
            sizes = []
        if num_sparse and shape.experts is not None:
            width = 2 * shape.experts.intermediate_size // self.expert_tensor
            sizes.append(shape.experts.num_experts // self.expert * width * hidden)
        if self.is_first or (self.is_last and not role.has_value_head):
            sizes.append(self._embedding(shape))
        return max(sizes)

    def adapter_parameters(self, role: PlannedModel) -> Parameters:
        """Count a rank's part of A and B: one of the two is whole on each tensor-parallel rank."""
        adapter, shape = role.adapter, role.shape
        if adapter is None:
            return self.none
        num_layers, num_sparse = len(self.layers_of(shape)), self.num_sparse(shape)
        dense = expert = 0
        for name in adapter.modules:
            outputs, inputs = shape.linear_sizes[name]
            num_dense = num_layers - num_sparse if name in _OF_MLP else num_layers
            dense += num_dense * _sides(name, outputs, inputs, size=self.tensor)
            if name in _OF_MLP and shape.experts is not None:
                width, hidden = shape.experts.intermediate_size, shape.hidden_size
                outputs, inputs = (width, hidden) if name in _COLUMN else (hidden, width)
                sides = _sides(name, outputs, inputs, size=self.expert_tensor)
                expert += num_sparse * (shape.experts.num_experts // self.expert) * sides
        return self._counted(adapter.rank * dense, adapter.rank * expert)

    def _counted(self, dense: int, expert: int) -> Parameters:
        expert_ranks = self.pipeline * self.expert * self.expert_tensor
        return Parameters(
            dense=dense,
            expert=expert,
            dense_shards=max(1, self.num_ranks // (self.tensor * self.pipeline)),
            expert_shards=max(1, self.num_ranks // expert_ranks),
        )


def _sides(name: str, outputs: int, inputs: int, *, size: int) -> int:
    """Return outputs plus inputs on a rank, for a matrix that is cut by columns or by rows."""
    return outputs // size + inputs if name in _COLUMN else outputs + inputs // size


def padded_words(vocab_size: int, *, tp_size: int) -> int:
    """Return the rows of a padded embedding: a multiple of 8 on every tensor-parallel rank."""
    multiple = _WORDS_PER_RANK * tp_size
    return -(-vocab_size // multiple) * multiple
