"""How ranks split a model, and which of its parameters are on one rank.

For FSDP2 every size of the split is one: its ranks divide the weights themselves. Ranks of
megatron-core hold tensor, pipeline and expert slices; data-parallel ranks divide the optimizer
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hybridrl.config.architecture import MLP_MODULES, Architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import LoraConfig

_ROWS_PER_RANK = 8
"""The vocabulary is padded to a multiple of this many rows on each tensor-parallel rank."""

_BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
"""Linear layers whose outputs tensor-parallel ranks divide; of the others they divide inputs."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers on one rank. Experts and all other weights are divided over different ranks."""

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """All numbers on this rank."""
        return self.dense + self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Parallel sizes, and one stage of the pipeline."""

    num_ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    num_virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    sequence: int = 1
    """Ranks over which norms and residuals are divided: ``tensor``, or 1."""

    stage: int = 0
    """Pipeline stage, from 0."""

    first: int | None = None
    """Layers of the first stage; None: as many as each stage in between."""

    last: int | None = None

    pads_vocabulary: bool = False
    """Whether megatron-core pads the vocabulary."""

    @classmethod
    def of_megatron(cls, config: ExperimentConfig, *, num_ranks: int, stage: int) -> Self:
        """Read the section ``megatron``."""
        sizes = config.megatron
        return cls(
            num_ranks=num_ranks,
            tensor=sizes.tensor_parallel_size,
            pipeline=sizes.pipeline_parallel_size,
            num_virtual=sizes.num_virtual_stages,
            context=sizes.context_parallel_size,
            expert=sizes.expert_parallel_size,
            expert_tensor=sizes.expert_tensor_parallel_size,
            sequence=sizes.tensor_parallel_size if sizes.sequence_parallel else 1,
            stage=stage,
            first=sizes.num_layers_in_first_stage,
            last=sizes.num_layers_in_last_stage,
            pads_vocabulary=True,
        )

    @property
    def is_first(self) -> bool:
        """Whether the stage has the input embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last norm, and the output embedding or the value head."""
        return self.stage == self.pipeline - 1

    def layers_of(self, model: Architecture) -> tuple[int, ...]:
        """Return the stage's layers, from 0: a span of each virtual stage."""
        sizes = self._layers_of_stages(model.num_layers)
        begin, length = sum(sizes[: self.stage]), sizes[self.stage]
        begins = (chunk * sum(sizes) + begin for chunk in range(self.num_virtual))
        return tuple(layer for begin in begins for layer in range(begin, begin + length))

    def _layers_of_stages(self, num_layers: int) -> list[int]:
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

    def num_sparse(self, model: Architecture) -> int:
        """Return how many of the stage's layers have experts."""
        sparse = model.experts.sparse_layers if model.experts else ()
        return len(set(sparse).intersection(self.layers_of(model)))

    def in_flight(self, num_microbatches: int) -> float:
        """Return the most micro-batches of a stage that wait for their backward pass.

        One forward, one backward (arXiv:2104.04473): stage p of P keeps P - p. With V virtual
        stages the warm-up is 2 (P - p - 1) + (V - 1) P passes of 1 / V of the stage's layers.
        """
        after = self.pipeline - self.stage - 1
        if self.num_virtual == 1:
            return min(num_microbatches, after + 1)
        pieces = 2 * after + (self.num_virtual - 1) * self.pipeline + 1
        return min(num_microbatches, pieces / self.num_virtual)

    def share(self, parameters: Parameters) -> int:
        """Return how many of a rank's numbers it keeps if data-parallel ranks divide them."""
        dense_ranks = max(1, self.num_ranks // (self.tensor * self.pipeline))
        model_ranks = self.pipeline * self.expert * self.expert_tensor
        expert_ranks = max(1, self.num_ranks // model_ranks)
        return -(-parameters.dense // dense_ranks) + -(-parameters.expert // expert_ranks)

    # -- counts ----------------------------------------------------------------------------------

    def count(self, model: Architecture, *, has_value_head: bool = False) -> Parameters:
        """Count the parameters on a rank, without those of an adapter."""
        num_layers, num_sparse = len(self.layers_of(model)), self.num_sparse(model)
        sparse = self.count_block(model, is_sparse=True) if num_sparse else Parameters()
        dense = (num_layers - num_sparse) * self.count_block(model, is_sparse=False).total
        root = self.count_root(model, has_value_head=has_value_head)
        return Parameters(dense + num_sparse * sparse.dense + root, num_sparse * sparse.expert)

    def count_block(self, model: Architecture, *, is_sparse: bool) -> Parameters:
        """Count the parameters of a layer with or without experts."""
        hidden, inner, size = model.hidden_size, model.intermediate_size, self.tensor
        attention = 2 * hidden * (model.query_size + model.key_size) // size
        attention += model.has_qkv_bias * (model.query_size + 2 * model.key_size) // size
        norms = model.num_norms * hidden + model.has_head_norms * 2 * model.head_size
        norms += model.norms_all_heads * (model.query_size + model.key_size)
        block = attention + norms + model.has_output_bias * hidden
        if not is_sparse or model.experts is None:
            mlp = 3 * hidden * inner // size + model.has_mlp_bias * (2 * inner // size + hidden)
            return Parameters(block + mlp)
        block += hidden * model.experts.num_experts
        if model.experts.shared_size:  # an expert for all tokens, and its gate
            block += 3 * hidden * model.experts.shared_size // size + hidden
        num_of_expert = 3 * hidden * model.experts.intermediate_size // self.expert_tensor
        return Parameters(block, model.experts.num_experts // self.expert * num_of_expert)

    def count_root(self, model: Architecture, *, has_value_head: bool = False) -> int:
        """Count numbers outside the blocks: embeddings or a value head, and the last norm."""
        embedding = self.count_embedding(model)
        head = model.hidden_size + 1 if has_value_head else embedding
        is_shared = model.is_tied and self.is_first and not has_value_head
        last = model.hidden_size + (0 if is_shared else head)
        return self.is_first * embedding + self.is_last * last

    def count_embedding(self, model: Architecture) -> int:
        """Count the numbers of one embedding on a rank."""
        return self.vocabulary(model) * model.hidden_size

    def vocabulary(self, model: Architecture) -> int:
        """Return the rows of an embedding on a rank."""
        if not self.pads_vocabulary:
            return model.vocab_size
        return padded_vocabulary(model.vocab_size, tp_size=self.tensor) // self.tensor

    def largest_matrix(self, model: Architecture, *, has_value_head: bool = False) -> int:
        """Count the largest matrix of the stage: its gradient is one tensor."""
        hidden, num_sparse = model.hidden_size, self.num_sparse(model)
        sizes = [2 * hidden * model.intermediate_size // self.tensor]
        if num_sparse == len(self.layers_of(model)):
            sizes = []
        if num_sparse and model.experts is not None:
            width = 2 * model.experts.intermediate_size // self.expert_tensor
            sizes.append(model.experts.num_experts // self.expert * width * hidden)
            sizes.append(2 * hidden * model.experts.shared_size // self.tensor)
        if self.is_first or (self.is_last and not has_value_head):
            sizes.append(self.count_embedding(model))
        return max(sizes)

    def largest_gathered(self, model: Architecture) -> int:
        """Count the largest tensor that FSDP2 gathers: the embedding, or inputs of all experts."""
        fused = 0
        if model.experts is not None:
            width = 2 * model.experts.intermediate_size
            fused = model.experts.num_experts * width * model.hidden_size
        return max(self.count_embedding(model), fused)

    def count_adapter(self, model: Architecture, lora: LoraConfig) -> Parameters:
        """Count the numbers of A and B on a rank: one of the two is not split."""
        num_layers, num_sparse = len(self.layers_of(model)), self.num_sparse(model)
        dense = expert = 0
        for name, (outputs, inputs) in model.linear_sizes.items():
            if name not in lora.modules:
                continue
            num_dense = num_layers - num_sparse if name in MLP_MODULES else num_layers
            dense += num_dense * _sides(name, outputs, inputs, size=self.tensor)
            experts = model.experts
            if name not in MLP_MODULES or experts is None:
                continue
            per_rank = num_sparse * (experts.num_experts // self.expert)
            for_all, for_some = (
                _sides(name, *_turned(name, width, model.hidden_size), size=size)
                for width, size in (
                    (experts.shared_size, self.tensor),
                    (experts.intermediate_size, self.expert_tensor),
                )
            )
            dense += num_sparse * bool(experts.shared_size) * for_all
            expert += per_rank * for_some
        return Parameters(lora.rank * dense, lora.rank * expert)


def _sides(name: str, outputs: int, inputs: int, *, size: int) -> int:
    """Return outputs plus inputs on a rank of a matrix that is split by columns or by rows."""
    return outputs // size + inputs if name in _BY_COLUMNS else outputs + inputs // size


def _turned(name: str, width: int, hidden: int) -> tuple[int, int]:
    """Return outputs and inputs of a layer of an MLP that is ``width`` wide inside."""
    return (width, hidden) if name in _BY_COLUMNS else (hidden, width)


def padded_vocabulary(vocab_size: int, *, tp_size: int) -> int:
    """Return the rows of a padded embedding: a multiple of 8 on every tensor-parallel rank."""
    multiple = _ROWS_PER_RANK * tp_size
    return -(-vocab_size // multiple) * multiple


def count_parameters(model: Architecture) -> int:
    """Count all parameters, tied ones once, as transformers does."""
    return Split().count(model).total
