"""The base of all engines: a model that learns, is offloaded, saved and exported.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hybridrl.algorithms.aggregate import token_mean
from hybridrl.algorithms.load import Part
from hybridrl.batch import TrainBatch, jagged_from, row_lengths
from hybridrl.errors import PhaseError
from hybridrl.metrics import Last, Max, Metrics, Sum, merge
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.backend import Backend, Compute, Output
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import Configuration, write_hf_folder, write_on_first
from hybridrl.workers.train.microbatcher import MicroBatch, Rows
from hybridrl.workers.train.offload import OffloadedTensors, resident_bytes
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.shard_spec import RankShards

WeightedLoss: TypeAlias = Callable[[MicroBatch, Output, Tensor], tuple[Tensor, Metrics]]
"""From a micro-batch, its output and the weight of each scored token [S] in the global loss, to the
micro-batch's share of that loss and metrics."""


TOKEN_MEAN = Part.of(token_mean)  # each token of a step weighs the same


class ModelEngine:
    """A model on a training back end; ``area`` begins its metrics, ``policy`` or ``critic``."""

    dp_rank: int  # among the data-parallel ranks, which have different rows
    dp_size: int
    is_output_rank: bool

    def __init__(self, backend: Backend, *, area: str) -> None:
        self.backend = backend
        self.dp_rank, self.dp_size = backend.data_ranks.rank, backend.data_ranks.size
        self.is_output_rank = backend.is_output_rank
        self._area = area
        # One of the ranks that share a micro-batch counts its tokens, once for policy and critic.
        self._counts_tokens = area == "policy" and self.is_output_rank
        self._offloaded: dict[TrainState, OffloadedTensors] = {}

    def offload(self, state: TrainState) -> None:
        """See ``OffloadableModel``."""
        if state not in self._offloaded:
            self._offloaded[state] = OffloadedTensors(self.backend.tensors(state))

    def restore(self, state: TrainState) -> None:
        """See ``OffloadableModel``."""
        if state in self._offloaded:
            self._offloaded[state].restore()  # may run out of memory, and be called again
            del self._offloaded[state]

    def resident_bytes(self, state: TrainState) -> int:
        """See ``OffloadableModel``."""
        return resident_bytes(self.backend.tensors(state))

    def weight_specs(self, weight_set: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """See ``Backend``."""
        return self.backend.weight_specs(weight_set)

    def full_weights(
        self, weight_set: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> NamedTensors:
        """See ``Backend``.

        Weights have their Hugging Face names, tied ones come once. With ``lora.sync=merged`` the
        base includes the adapter, merged into a copy. Without shards a tensor is the live weight.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        yield from self.backend.full_weights(weight_set, dtype)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, configuration, tokenizer), atomically.

        An adapter is merged into the written weights alone. Rank 0 writes; all ranks return, or
        raise a RunFolderError, together.
        """
        self._require("export_hf()", TrainState.PARAMETERS)

        def write(weights: NamedTensors) -> None:
            write_hf_folder(
                folder,
                weights,
                specs=self.weight_specs(),
                configs=self.hf_configs(),
                source=self.backend.folder,
            )

        write_on_first(Ranks(self.backend.device), self.backend.merged_weights(), write)

    def hf_configs(self) -> Sequence[Configuration]:
        """See ``Backend``."""
        return self.backend.hf_configs()

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        return self.backend.optimizer.num_steps

    def checkpoint_tensors(self) -> Mapping[str, RankShards]:
        """See ``Backend``."""
        self._require("checkpoint_tensors()", *TrainState)
        return self.backend.checkpoint_tensors()

    def _require(self, action: str, *states: TrainState) -> None:
        offloaded = [state.value for state in states if state in self._offloaded]
        if offloaded:
            raise PhaseError(
                f"{action} needs {' and '.join(offloaded)} on {self.backend.device}, and they are "
                "offloaded; leave the rollout phase first, or call restore() for each of them"
            )

    def _compute_columns(self, rows: Rows, compute: Compute, *, num_columns: int) -> list[Tensor]:
        """Return each column, jagged float32 [B, L] on the host, 0 where the mask is False."""
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
        aggregation: Part = TOKEN_MEAN,
        max_response_tokens: int = 1,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows, or skip it.

        Each token's loss is multiplied by its weight in the *global* loss, then summed over tokens,
        micro-batches and ranks. So the result does not depend on how rows are divided.
        """
        self._require("update()", *TrainState)
        microbatches = self.backend.microbatches(batch)
        response_lengths_B = microbatches.response_lengths_B
        own_counts = [int(response_lengths_B.sum()), int(response_lengths_B.count_nonzero())]
        num_tokens, num_rows = self.backend.data_ranks.gather(own_counts).sum(dim=0).tolist()
        group_tokens_B, num_prompts = None, None
        if isinstance(batch, TrainBatch) and batch.group_rows_B is not None:
            group_tokens_B, group_rows_B = batch.group_tokens_B, batch.group_rows_B
            # A part of a prompt's rows counts as that part of a prompt.
            shares_B = torch.where(group_rows_B > 0, 1 / group_rows_B.double(), 0.0)
            num_prompts = float(self.backend.data_ranks.sum(shares_B.sum().to(self.backend.device)))
        weights_B = aggregation(
            response_lengths_B=response_lengths_B,
            num_tokens_global=num_tokens,
            num_sequences_global=num_rows,
            max_response_tokens=max_response_tokens,
            group_tokens_B=group_tokens_B,
            num_prompts_global=num_prompts,
        ).to(self.backend.device)

        def loss_of(microbatch: MicroBatch, output: Output) -> tuple[Tensor, Metrics]:
            share, metrics = weighted_loss(microbatch, output, microbatch.rows.spread(weights_B))
            if self._counts_tokens and microbatch.num_tokens:
                metrics = metrics | {
                    "data/train_tokens": Sum(microbatch.num_tokens),
                    "data/loss_tokens": Sum(microbatch.rows.num_tokens),
                    "data/microbatches": Sum(1),
                }
            return share, metrics

        outcome = self.backend.train_step(microbatches, compute, loss_of)
        counts = self.is_output_rank and self.dp_rank == 0
        of_step = step_metrics(outcome.result, area=self._area, counts=counts)
        return merge([outcome.loss_metrics, self._model_metrics(outcome.model_metrics) | of_step])

    def _model_metrics(self, _metrics: Metrics) -> Metrics:
        """Return the model's own metrics; a role that reports them overrides this."""
        return {}


def values_of(model: nn.Module, tokens: PackedTokens) -> Tensor:
    """Compute a value model: the ``Compute`` of critics and reward models."""
    values: Tensor = model(tokens)
    return values


def step_metrics(result: StepResult, *, area: str, counts: bool) -> Metrics:
    """Report a step; ``counts`` is True on exactly one rank, because counts of ranks are added."""
    metrics: Metrics = {f"{area}/lr": Last(result.lr)}
    if not result.is_skipped:
        metrics[f"{area}/grad_norm"] = Max(result.grad_norm)
    if counts:
        metrics[f"{area}/updates"] = Sum(int(not result.is_skipped))
        metrics[f"{area}/skipped_updates"] = Sum(int(result.is_skipped))
    return metrics
