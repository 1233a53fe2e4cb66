"""The interface of a training back end: all that a new training library must implement.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hybridrl.batch import RolloutBatch, TrainBatch, routed_experts_of, row_offsets
from hybridrl.errors import DataError
from hybridrl.metrics import Metrics
from hybridrl.models.architecture import Architecture
from hybridrl.models.packed_attention import AttentionKernel
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.microbatcher import MicroBatch, MicroBatcher, MicroBatches, Rows
from hybridrl.workers.train.optimizer import GuardedOptimizer, StepResult
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.shard_spec import RankShards

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


Output: TypeAlias = Tensor | tuple[Tensor, ...]

Compute: TypeAlias = Callable[[nn.Module, PackedTokens], Output]

LossOf: TypeAlias = Callable[[MicroBatch, Output], tuple[Tensor, Metrics]]
"""From a micro-batch and its output to its share of the global loss, to be *summed*, and metrics.
For a dummy micro-batch the share is a 0 that carries a gradient, and metrics are empty."""


def as_columns(output: Output, num_columns: int) -> Tensor:
    """Return the output of a head as one tensor, float32 [columns, S]."""
    columns = torch.stack(output) if isinstance(output, tuple) else output
    return columns.float().view(num_columns, -1)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step."""

    result: StepResult  # the same on all ranks
    loss_metrics: Metrics  # of this rank's rows; empty unless this is an output rank
    model_metrics: Metrics = field(default_factory=dict)
    """Of the model itself, such as the load of its experts; the same on all ranks."""


class Backend(Protocol):
    """A model in shards and, if it learns, its optimizer; base class of all back ends.

    Every method is a collective: all ranks call it in the same order, whatever their rows.
    """

    folder: Path  # the Hugging Face folder that the model came from
    device: torch.device
    data_ranks: Ranks  # the data-parallel ranks, each of which has rows of its own
    is_output_rank: bool  # returns results: exactly one of the ranks with the same rows
    adapter: Adapter | None  # learns instead of the weights
    batcher: MicroBatcher
    routed: Architecture | None  # of a policy that learns with ``actor.replay_routing``

    @property
    def weight_sets(self) -> tuple[WeightSet, ...]:
        """The weights of rollout engines, in the order of loading; steps change only the last set.

        ``(BASE,)`` for full fine-tuning and for LoRA that is merged before it is sent,
        ``(BASE, ADAPTER)`` where rollout engines apply the adapter.
        """
        sends_adapter = self.adapter is not None and self.adapter.config.sync == "adapter"
        return (WeightSet.BASE, WeightSet.ADAPTER) if sends_adapter else (WeightSet.BASE,)

    @property
    def optimizer(self) -> GuardedOptimizer:
        """Gradients, moments, and the number of steps taken."""
        ...

    def checkpoint_tensors(self) -> Mapping[str, RankShards]:
        """List this rank's shards of the live tensors that a resumed run needs, views of them.

        They are the parameters that learn and, after the first step, the optimizer's moments, under
        the names of FSDP2. Every rank lists all names, with empty ``RankShards`` for tensors of
        other ranks. So each back end resumes the runs of every other. Nothing may be offloaded.
        """
        ...

    def end_restore(self) -> None:
        """Use the values with which the caller has filled ``checkpoint_tensors``."""
        ...

    def microbatches(self, rows: Rows) -> MicroBatches:
        """Divide this rank's rows; all data-parallel ranks get equally many micro-batches.

        A DataError if a sequence begins with a response, or rows lack the experts of a replay.
        """
        experts = None if self.routed is None else routes_of(rows, self.routed)
        return self.batcher.divide(rows, experts)

    def forward(self, microbatches: MicroBatches, compute: Compute, *, num_columns: int) -> Tensor:
        """Compute without gradient; all ranks with the same rows get the result.

        It is float32 [num_columns, tokens of all rows] on the host, 0 where a token is not scored.
        """
        ...

    def train_step(
        self, microbatches: MicroBatches, compute: Compute, loss_of: LossOf
    ) -> StepOutcome:
        """Compute forward and backward, sum gradients over all ranks, and take one step.

        All ranks skip a step whose loss or gradient norm is not finite.
        """
        ...

    def weight_specs(self, weight_set: WeightSet) -> tuple[WeightSpec, ...]:
        """Describe the tensors of ``full_weights``, in its order."""
        ...

    def full_weights(self, weight_set: WeightSet, dtype: torch.dtype | None) -> NamedTensors:
        """Yield each full weight of a set, one at a time. Every rank must exhaust it.

        Shards in a wider type than ``dtype``, the receiver's, may be cast to it first.
        """
        ...

    def merged_weights(self) -> NamedTensors:
        """Yield the weights of the same model without adapters, named as in ``BASE``."""
        ...

    def hf_configs(self) -> Sequence[Configuration]:
        """Return the configurations of an exported folder."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Compute without the adapter inside the ``with``."""
        ...

    def tensors(self, state: TrainState) -> list[Tensor]:
        """Return this rank's plain tensors of a state, those that can leave the device."""
        ...


def choose_kernel(attention: str, compute_dtype: str, device: torch.device) -> AttentionKernel:
    """Choose the attention kernel for ``model.attention`` on a device."""
    has_varlen = device.type == "cuda" and compute_dtype == "bfloat16"
    return "varlen" if has_varlen and attention != "padded" else "padded"


def routes_of(rows: Rows, architecture: Architecture) -> Tensor:
    """Return the experts of all tokens but the last of each row, int16; DataError without them."""
    experts_BLJK = routed_experts_of(rows) if isinstance(rows, RolloutBatch | TrainBatch) else None
    remedy = "set actor.replay_routing=false"
    if experts_BLJK is None:
        raise DataError(f"the rows do not contain the experts of their tokens; {remedy}")
    experts = architecture.experts
    num_experts, num_per_token = (
        (0, 0) if experts is None else (experts.num_experts, experts.num_per_token)
    )
    shape, expected = experts_BLJK.values().shape[1:], (architecture.num_layers, num_per_token)
    if shape != expected:
        raise DataError(
            f"the rows contain experts of {shape[0]} layers, {shape[1]} per token, and the model "
            f"has {expected[0]} layers, {expected[1]} per token; {remedy}"
        )
    ends_B = row_offsets(experts_BLJK)[1:]
    sparse = [] if experts is None else list(experts.sparse_layers)
    used = experts_BLJK.values()[:, sparse]
    is_wrong_T = ((used < 0) | (used >= num_experts)).flatten(1).any(dim=1)
    is_wrong_T[ends_B - 1] = False  # the last token was not an input
    if is_wrong_T.any():
        index = int(is_wrong_T.nonzero()[0])
        row = int((ends_B <= index).sum())
        raise DataError(
            f"token {index - int(row_offsets(experts_BLJK)[row])} of row {row} names an expert "
            f"outside of the {num_experts} of each layer; {remedy}"
        )
    return experts_BLJK
