"""A reward model on any training back end: one score for each conversation.

Legend: B conversations, L tokens of a row, P pairs, S scored tokens of a micro-batch: the last of
each conversation. The last axis of [P, 2] is the chosen and the rejected answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridrl.algorithms.reward_model_loss import bradley_terry
from hybridrl.batch import (
    PreferenceBatch,
    RewardBatch,
    SupervisedBatch,
    response_lengths,
    row_offsets,
)
from hybridrl.metrics import Metrics
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.backend import Backend, Output
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.policy_engine import count_tokens
from hybridrl.workers.train.preference_objective import mean_over_pairs, of_held_out
from hybridrl.workers.train.protocol import TrainState


class RewardEngine(ModelEngine):
    """A value model that is read at the last token of a conversation.

    Batches are those of ``data/conversations.py``.

    Args:
        backend: of a reward model.
        center_coefficient: of the loss; see ``algorithms/reward_model_loss.py``.
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
        [values_BL] = self._compute_columns(rows, _compute, num_columns=1)
        rewards_B = values_BL.values()[row_offsets(values_BL)[1:] - 1]
        return RewardBatch(rewards_B=rewards_B.to(torch.float32), batch_size=rows.batch_size)

    def fit_pairs(self, batch: PreferenceBatch) -> Metrics:
        """Take one optimizer step on the mean loss of all ranks' pairs, or skip it."""

        def weighted_loss(
            microbatch: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            scores_S = cast(Tensor, output)
            share, metrics = self._loss_of(microbatch, scores_S, weights_S, batch.margins_B)
            return share, metrics | (count_tokens(microbatch) if self.is_output_rank else {})

        return self._take_step(batch, _compute, weighted_loss)

    def evaluate_pairs(self, batch: PreferenceBatch) -> Metrics:
        """Score held-out pairs: the same loss and metrics, no step.

        Pairs without a mask are not counted.
        """
        scores_P2 = self.compute_rewards(batch).rewards_B.view(-1, 2)
        counted_P = response_lengths(batch.response_mask_BL).view(-1, 2)[:, 0] > 0
        if not self.is_output_rank or not counted_P.any():
            return {}
        values = self._values(scores_P2[counted_P], _of_pairs(batch.margins_B, counted_P))
        return of_held_out(mean_over_pairs(values, torch.ones(len(scores_P2))[counted_P]))

    def hf_configs(self) -> Sequence[Configuration]:
        """Return the configurations of an exported folder."""
        configs = self.backend.hf_configs()
        if self._pad_token_id is not None:
            cast(PretrainedConfig, configs[0]).pad_token_id = self._pad_token_id
        return configs

    def _loss_of(
        self,
        microbatch: MicroBatch,
        scores_S: Tensor,
        weights_S: Tensor,
        margins_B: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the global loss, to be *summed*, and its metrics.

        Ranks that share tokens all compute the loss of a pair, and each counts for the rows whose
        last token it has. A dummy micro-batch has a share of 0 with a gradient.
        """
        rows = microbatch.rows
        scores_P2, weights_P2 = rows.sum(scores_S).view(-1, 2), rows.sum(weights_S).view(-1, 2)
        computed_P = (rows.lengths_R.view(-1, 2) > 0).all(dim=1).nonzero()[:, 0]
        if not len(computed_P):
            return scores_P2.sum() * 0.0, {}
        own_P2 = rows.row_T.bincount(minlength=len(rows.lengths_R)).view(-1, 2)
        shares_P = own_P2.float().mean(dim=1)[computed_P]
        margins_P = _of_pairs(margins_B, computed_P)
        values = self._values(scores_P2[computed_P], margins_P)
        share = (values["loss/preference"] * shares_P * weights_P2.sum(dim=1)[computed_P]).sum()
        detached = {name: values_P.detach() for name, values_P in values.items()}
        return share, mean_over_pairs(detached, shares_P)

    def _values(self, scores_P2: Tensor, margins_P: Tensor | None) -> Mapping[str, Tensor]:
        """Return the loss of each pair, and metrics to average over pairs, each [P]."""
        chosen_P, rejected_P = scores_P2.unbind(dim=1)
        differences_P = (chosen_P - rejected_P).detach()
        return {
            "loss/preference": bradley_terry(
                chosen_P,
                rejected_P,
                margins_P=margins_P,
                center_coefficient=self._center_coefficient,
            ),
            "preference/chosen_reward/mean": chosen_P.detach(),
            "preference/rejected_reward/mean": rejected_P.detach(),
            "preference/margin/mean": differences_P,
            "preference/accuracy": torch.heaviside(differences_P, differences_P.new_tensor(0.5)),
        }


def _compute(model: nn.Module, tokens: PackedTokens) -> Tensor:
    values: Tensor = model(tokens)
    return values


def _of_pairs(column_B: Tensor | None, index_P: Tensor) -> Tensor | None:
    """Return a column of rows, whose pairs have equal values, at these pairs."""
    return None if column_B is None else column_B.view(-1, 2)[:, 0].to(index_P.device)[index_P]
