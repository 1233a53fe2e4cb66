"""The contract of a training back end: what a new training library has to write, and nothing else.

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

from hybridrl.batch import CriticBatch, RolloutBatch, SupervisedBatch, TrainBatch
from hybridrl.errors import ConfigError
from hybridrl.metrics import Metrics
from hybridrl.models.packed import AttentionKernel
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.microbatcher import MicroBatch, MicroBatches
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.places import CheckpointTensor
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


Rows: TypeAlias = RolloutBatch | TrainBatch | SupervisedBatch | CriticBatch

Output: TypeAlias = Tensor | tuple[Tensor, ...]
"""Columns of scored tokens: a tuple of float [S], one float [columns, S], or [S] if there is one.
On a pipeline rank that has not the head: hidden states."""

Compute: TypeAlias = Callable[[nn.Module, PackedTokens], Output]
"""Computes a micro-batch on the model, or on one stage of it."""

LossOf: TypeAlias = Callable[[MicroBatch, Output], tuple[Tensor, Metrics]]
"""From a micro-batch and its output to its share of the global loss, to be *summed*, and metrics.
A dummy micro-batch gives a 0 that carries a gradient, and no metrics."""


def as_columns(output: Output, num_columns: int) -> Tensor:
    """Return the output of a head as one tensor, float32 [columns, S]."""
    columns = torch.stack(output) if isinstance(output, tuple) else output
    return columns.float().view(num_columns, -1)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One optimizer step."""

    result: StepResult
    """The same on all ranks."""

    loss_metrics: Metrics
    """Of this rank's rows, from ``LossOf``; empty unless this is an output rank."""

    model_metrics: Metrics = field(default_factory=dict)
    """Of the model itself, such as the load of its experts; the same on all ranks."""


class Backend(Protocol):
    """A model in shards and, if it learns, its optimizer.

    Every method is a collective: all ranks call it, in the same order, whatever their rows.
    """

    folder: Path
    """The Hugging Face folder that the model came from."""

    device: torch.device
    """Where the model computes."""

    data_ranks: Ranks
    """The data-parallel ranks, each of which has rows of its own."""

    is_output_rank: bool
    """Whether this rank answers for those that have the same rows: exactly one of them does."""

    weight_parts: tuple[WeightSet, ...]
    """What rollout engines need; see ``TrainEngine.weight_parts``."""

    adapter: Adapter | None
    """What learns in place of the weights."""

    def microbatches(self, rows: Rows) -> MicroBatches:
        """Divide this rank's rows; every data-parallel rank gets as many micro-batches.

        Raises:
            DataError: a row begins with a response token, which no token predicts.
        """
        ...

    def forward(self, microbatches: MicroBatches, compute: Compute, *, num_columns: int) -> Tensor:
        """Compute without gradient; every rank that has the same rows gets the answer.

        Returns:
            float32 [num_columns, tokens of all rows] on the host, 0 where nothing is scored.
        """
        ...

    def train_step(
        self, microbatches: MicroBatches, compute: Compute, loss_of: LossOf
    ) -> StepOutcome:
        """Compute forward and backward, sum gradients over all ranks, and take one step.

        A step whose loss or gradient norm is not finite is skipped, on all ranks alike.
        """
        ...

    def weight_specs(self, part: WeightSet) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        ...

    def full_weights(self, part: WeightSet) -> NamedTensors:
        """Yield each weight of a part, gathered from its shards, one at a time."""
        ...

    def merged_weights(self) -> NamedTensors:
        """Yield what a model without adapters needs to be this one, named as ``BASE`` is."""
        ...

    def hf_configs(self) -> Sequence[Configuration]:
        """Return the configurations that an exported folder holds."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Compute as the model that was loaded, meanwhile."""
        ...

    def tensors(self, state: TrainState) -> list[Tensor]:
        """Return this rank's plain tensors of a state, those that can leave the device."""
        ...

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        ...

    def checkpoint_tensors(self) -> Mapping[str, CheckpointTensor]:
        """Name what a resumed run needs; see ``LearningEngine.checkpoint_tensors``."""
        ...

    def begin_restore(self, *, num_updates: int) -> None:
        """Go to ``num_updates``, with moments that are still to be filled."""
        ...

    def end_restore(self) -> None:
        """Do what must follow from the filling."""
        ...


def choose_kernel(attention: str, compute_dtype: str, device: torch.device) -> AttentionKernel:
    """Return the attention kernel that ``model.attention`` means on a device.

    Raises:
        ConfigError: it does not run there in the compute type.
    """
    has_varlen = device.type == "cuda" and compute_dtype == "bfloat16"
    if attention == "varlen" and not has_varlen:
        raise ConfigError(
            "model.attention",
            attention,
            rule=f"the varlen kernel runs on CUDA in bfloat16, not on {device} in {compute_dtype}",
            fix="set model.attention=auto",
        )
    return "varlen" if has_varlen and attention != "padded" else "padded"
