"""Value models on any training back end: the critic, and reward models that score conversations.

Legend: B conversations, L tokens of a row, P pairs, S scored tokens of a micro-batch: of a reward
model the last of each conversation. The last axis of [P, 2] is the chosen and the rejected answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.value_loss import bradley_terry, clipped_value_loss
from hybridrl.batch import (
    CriticBatch,
    PreferenceBatch,
    RewardBatch,
    RolloutBatch,
    SupervisedBatch,
    ValueBatch,
    response_lengths,
    row_offsets,
)
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.train.backend import Backend, Output
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.losses import (
    PairValues,
    describe_rewards,
    loss_of_microbatch,
    mean_over_pairs,
    of_held_out,
)
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.model_engine import TOKEN_MEAN, ModelEngine, values_of
from hybridrl.workers.train.protocol import TrainState


class CriticEngine(ModelEngine):
    """A critic, whose values move by ``value_clip`` before the loss is clipped; 0 is off."""

    def __init__(self, backend: Backend, *, value_clip: float) -> None:
        super().__init__(backend, area="critic")
        self._value_clip = value_clip

    def compute_values(self, rows: RolloutBatch) -> ValueBatch:
        """Value the state before each response token of this rank's rows; values on the host."""
        self._require("compute_values()", TrainState.PARAMETERS)
        [values_BL] = self._compute_columns(rows, values_of, num_columns=1)
        return ValueBatch(values_BL=values_BL, batch_size=rows.batch_size)

    def update(
        self, batch: CriticBatch, *, aggregation: Part = TOKEN_MEAN, max_response_tokens: int = 1
    ) -> Metrics:
        """Take one optimizer step on the loss of all ranks' response tokens, or skip it."""

        def weighted_loss(
            microbatch: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            values_S, index_S = cast(Tensor, output), microbatch.token_index_S
            loss = clipped_value_loss(
                values_S,
                old_values_T=batch.old_values_BL.values()[index_S].to(values_S.device),
                returns_T=batch.returns_BL.values()[index_S].to(values_S.device),
                value_clip=self._value_clip,
            )
            share = (loss.losses_T * weights_S).sum()
            if not len(index_S):
                return share, {}
            sums = torch.stack([share, weights_S.sum(), loss.is_clipped_T.sum()]).detach().tolist()
            return share, {
                "loss/value": Mean(sums[0], sums[1]),
                "critic/clip_fraction": Mean(sums[2], len(index_S)),
            }

        return self._take_step(
            batch,
            values_of,
            weighted_loss,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )


class RewardEngine(ModelEngine):
    """A value model that is read at the last token of a conversation (``data/conversations.py``).

    ``pad_token_id`` is for exports: by it other programs find the last token of a padded row.
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
        """Score held-out pairs, but those without a mask: the same loss and metrics, no step."""
        scores_P2 = self.compute_rewards(batch).rewards_B.view(-1, 2)
        counted_P = response_lengths(batch.response_mask_BL).view(-1, 2)[:, 0] > 0
        if not self.is_output_rank or not counted_P.any():
            return {}
        _, values = self._values(scores_P2[counted_P], _of_pairs(batch.margins_B, counted_P))
        return of_held_out(mean_over_pairs(values, torch.ones(len(scores_P2))[counted_P]))

    def hf_configs(self) -> Sequence[Configuration]:
        """See ``Backend``."""
        configs = self.backend.hf_configs()
        if self._pad_token_id is not None:
            configs[0].pad_token_id = self._pad_token_id
        return configs

    def _values(self, scores_P2: Tensor, margins_P: Tensor | None) -> PairValues:
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
