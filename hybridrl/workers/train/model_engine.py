"""What the engines of all roles share: a model that learns, leaves the device, is saved and sent.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from hybridrl.algorithms.aggregate import token_weights
from hybridrl.batch import jagged_from, row_lengths
from hybridrl.errors import PhaseError
from hybridrl.metrics import Last, Max, Metrics, Sum, merge
from hybridrl.workers.train.backend import Backend, Compute, Output, Rows
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import write_hf_folder, write_on_first
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.offload import OffloadedTensors, resident_bytes
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.places import CheckpointTensor
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec

WeightedLoss: TypeAlias = Callable[[MicroBatch, Output, Tensor], tuple[Tensor, Metrics]]
"""From a micro-batch, its output and the weight of each scored token [S] in the global loss, to the
micro-batch's share of that loss and metrics."""


class ModelEngine:
    """A model on a training back end; subclasses say what is computed and learned.

    Args:
        backend: has the model and, if it learns, its optimizer.
        area: of the metrics of its steps, ``policy`` or ``critic``.
    """

    dp_rank: int
    """This rank's place among those with other rows."""

    dp_size: int
    """Number of them."""

    leads: bool
    """Whether this rank answers for those that have the same rows."""

    def __init__(self, backend: Backend, *, area: str) -> None:
        self.backend = backend
        self.dp_rank, self.dp_size = backend.data_ranks.rank, backend.data_ranks.size
        self.leads = backend.is_output_rank
        self._area = area
        self._offloaded: dict[TrainState, OffloadedTensors] = {}

    def offload(self, part: TrainState) -> None:
        """Move a part to host memory and free its device memory. Twice is a no-op."""
        if part not in self._offloaded:
            self._offloaded[part] = OffloadedTensors(self.backend.tensors(part))

    def restore(self, part: TrainState) -> None:
        """Bring a part back, bitwise identical. Twice is a no-op."""
        if part in self._offloaded:
            self._offloaded[part].restore()  # may fail for want of memory, and be tried again
            del self._offloaded[part]

    def resident_bytes(self, part: TrainState) -> int:
        """Return the bytes that this part holds on the device of this rank, measured."""
        return resident_bytes(self.backend.tensors(part))

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        return self.backend.weight_specs(part)

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight of a part, gathered from its shards. Every rank must exhaust it.

        Weights have their Hugging Face names, tied ones come once. With ``lora.sync=merged`` the
        base has the adapter in it: merged on its way out, never in the training weights.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        yield from self.backend.full_weights(part)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, configuration, tokenizer), atomically.

        An adapter is merged into the weights written; the training weights stay apart. Rank 0
        writes; every rank returns, or raises, when it is done.

        Raises:
            RunFolderError: the folder exists already, or cannot be written.
        """
        self._require("export_hf()", TrainState.PARAMETERS)

        def write(weights: NamedTensors) -> None:
            write_hf_folder(
                folder,
                weights,
                specs=self.weight_specs(),
                configs=self.backend.hf_configs(),
                source=self.backend.folder,
            )

        write_on_first(Ranks(self.backend.device), self.backend.merged_weights(), write)

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        return self.backend.num_updates

    def checkpoint_tensors(self) -> Mapping[str, CheckpointTensor]:
        """Name parameters that learn, and their moments; see ``LearningEngine``."""
        self._require("checkpoint_tensors()", *TrainState)
        return self.backend.checkpoint_tensors()

    def begin_restore(self, *, num_updates: int) -> None:
        """Go to ``num_updates``, with moments that are still to be filled."""
        self.backend.begin_restore(num_updates=num_updates)

    def end_restore(self) -> None:
        """Let all ranks have what each has filled; a collective call."""
        self.backend.end_restore()

    def _require(self, action: str, *parts: TrainState) -> None:
        offloaded = [part.value for part in parts if part in self._offloaded]
        if offloaded:
            raise PhaseError(
                f"{action} needs {' and '.join(offloaded)} on {self.backend.device}, which are "
                "offloaded; leave the rollout phase first, or call restore() for each of them"
            )

    def _compute_columns(self, rows: Rows, compute: Compute, *, num_columns: int) -> list[Tensor]:
        """Compute this rank's rows without gradient.

        Returns:
            Each column, jagged float32 [B, L] on the host, 0 where the mask is False.
        """
        columns = self.backend.forward(
            self.backend.microbatches(rows), compute, num_columns=num_columns
        )
        lengths_B = row_lengths(rows.token_ids_BL)
        return [jagged_from(column, lengths_B) for column in columns]

    def _take_step(
        self,
        batch: Rows,
        compute: Compute,
        weighted_loss: WeightedLoss,
        *,
        aggregation: str = "token_mean",
        max_response_tokens: int = 1,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows, or skip it.

        Each token's loss is weighed by its share of the *global* loss before it is summed over
        tokens, micro-batches and ranks, so the result does not depend on how rows fall on them.

        Args:
            batch: this rank's rows.
            compute: computes a micro-batch.
            weighted_loss: makes a loss of what was computed.
            aggregation: how tokens weigh; see ``algorithms/aggregate.py``.
            max_response_tokens: the fixed length of one of the aggregations.
        """
        self._require("update()", *TrainState)
        microbatches = self.backend.microbatches(batch)
        weights_B = global_weights(
            microbatches.response_lengths_B,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
            ranks=self.backend.data_ranks,
        )

        def loss_of(microbatch: MicroBatch, output: Output) -> tuple[Tensor, Metrics]:
            weights_S = weights_B[microbatch.row_S].to(self.backend.device)
            return weighted_loss(microbatch, output, weights_S)

        outcome = self.backend.train_step(microbatches, compute, loss_of)
        counts = self.leads and self.dp_rank == 0
        of_step = step_metrics(outcome.result, area=self._area, counts=counts)
        return merge([outcome.loss_metrics, self._model_metrics(outcome.model_metrics) | of_step])

    def _model_metrics(self, _metrics: Metrics) -> Metrics:
        """Return what is reported of the model itself; a role that owns those names says so."""
        return {}


def global_weights(
    response_lengths_B: Tensor, *, aggregation: str, max_response_tokens: int, ranks: Ranks
) -> Tensor:
    """Return the weight of each token of each row in the *global* loss [B]; one collective.

    Args:
        response_lengths_B: of this rank's rows.
        aggregation: how tokens weigh; see ``algorithms/aggregate.py``.
        max_response_tokens: the fixed length of one of the aggregations.
        ranks: the data-parallel ranks.
    """
    own_counts = [int(response_lengths_B.sum()), len(response_lengths_B)]
    num_tokens, num_rows = ranks.gather(own_counts).sum(dim=0).tolist()
    return token_weights(
        response_lengths_B,
        aggregation=aggregation,
        num_tokens_global=num_tokens,
        num_sequences_global=num_rows,
        max_response_tokens=max_response_tokens,
    )


def step_metrics(result: StepResult, *, area: str, counts: bool) -> Metrics:
    """Report an optimizer step.

    Args:
        result: the same on all ranks.
        area: ``policy`` or ``critic``.
        counts: True on one rank alone, since counts of ranks are added.
    """
    metrics: Metrics = {f"{area}/lr": Last(result.lr)}
    if not result.is_skipped:
        metrics[f"{area}/grad_norm"] = Max(result.grad_norm)
    if counts:
        metrics[f"{area}/updates"] = Sum(int(not result.is_skipped))
        metrics[f"{area}/skipped_updates"] = Sum(int(result.is_skipped))
    return metrics
