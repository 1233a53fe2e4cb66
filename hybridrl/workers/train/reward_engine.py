"""A reward model on any training back end: one score for each conversation.

Legend: B conversations, L tokens of a row, P pairs, S scored tokens of a micro-batch: the last of
each conversation. The last axis of [P, 2] is the chosen and the rejected answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hybridrl.algorithms.value_loss import bradley_terry
from hybridrl.batch import (
    PreferenceBatch,
    RewardBatch,
    SupervisedBatch,
    response_lengths,
    row_offsets,
)
from hybridrl.metrics import Metrics
from hybridrl.workers.train.backend import Backend, Output
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.model_engine import ModelEngine, values_of
from hybridrl.workers.train.preference_objective import (
    PairValues,
    describe_rewards,
    loss_of_microbatch,
    mean_over_pairs,
    of_held_out,
)
from hybridrl.workers.train.protocol import TrainState


class RewardEngine(ModelEngine):
    """A value model that is read at the last token of a conversation.

    Batches are those of ``data/conversations.py``.

    Args:
        center_coefficient: of the loss; see ``algorithms/value_loss.py``.
        pad_token_id: goes into the configuration of an export, by which other programs find the
            last token of a padded row. None leaves it as it is.
    """

    def __init__(
        self, backend: Backend, *, center_coefficient: float = 0.0, pad_token_id: int | None = None
    ) -> None:
        super().__init__(backend, area="policy")
        self._center_coefficient = center_coefficient
        self._pad_token_id = pad_token_id

    def compute_rewards(self, rows: SupervisedBatch | PreferenceBatch) -> RewardBatch:
        """Score this rank's conversations; scores on the host, 0 of rows without a mask."""
        self._require("compute_rewards()", TrainState.PARAMETERS)
        [values_BL] = self._compute_columns(rows, values_of, num_columns=1)
        rewards_B = values_BL.values()[row_offsets(values_BL)[1:] - 1]
        return RewardBatch(rewards_B=rewards_B.to(torch.float32), batch_size=rows.batch_size)

    def fit_pairs(self, batch: PreferenceBatch) -> Metrics:
        """Take one optimizer step on the mean loss of all ranks' pairs, or skip it."""

        def loss_of(scores_P2: Tensor, _: Tensor, index_P: Tensor) -> PairValues:
            return self._values(scores_P2, _of_pairs(batch.margins_B, index_P))

        def weighted_loss(
            microbatch: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            return loss_of_microbatch(microbatch, cast(Tensor, output), weights_S, loss_of)

        return self._take_step(batch, values_of, weighted_loss)

    def evaluate_pairs(self, batch: PreferenceBatch) -> Metrics:
        """Score held-out pairs: the same loss and metrics, no step.

        Pairs without a mask are not counted.
        """
        scores_P2 = self.compute_rewards(batch).rewards_B.view(-1, 2)
        counted_P = response_lengths(batch.response_mask_BL).view(-1, 2)[:, 0] > 0
        if not self.is_output_rank or not counted_P.any():
            return {}
        _, values = self._values(scores_P2[counted_P], _of_pairs(batch.margins_B, counted_P))
        return of_held_out(mean_over_pairs(values, torch.ones(len(scores_P2))[counted_P]))

    def hf_configs(self) -> Sequence[Configuration]:
        """Return the configurations of an exported folder."""
        configs = self.backend.hf_configs()
        if self._pad_token_id is not None:
            configs[0].pad_token_id = self._pad_token_id
        return configs

    def _values(self, scores_P2: Tensor, margins_P: Tensor | None) -> PairValues:
        """Return the loss of each pair, and metrics to average over pairs, each [P]."""
        chosen_P, rejected_P = scores_P2.unbind(dim=1)
        losses_P = bradley_terry(
            chosen_P,
            rejected_P,
            margins_P=margins_P,
            center_coefficient=self._center_coefficient,
        )
        described = describe_rewards(chosen_P.detach(), rejected_P.detach())
        return losses_P, {"loss/preference": losses_P.detach(), **described}


def _of_pairs(column_B: Tensor | None, index_P: Tensor) -> Tensor | None:
    """Return a column of rows, whose pairs have equal values, at these pairs."""
    return None if column_B is None else column_B.view(-1, 2)[:, 0].to(index_P.device)[index_P]
