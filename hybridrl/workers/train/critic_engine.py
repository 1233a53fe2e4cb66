"""The critic on any training back end: values states, and learns their returns.

Legend: S scored (response) tokens.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.value_loss import clipped_value_loss
from hybridrl.batch import CriticBatch, RolloutBatch, ValueBatch
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.train.backend import Backend, Output
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.model_engine import TOKEN_MEAN, ModelEngine, values_of
from hybridrl.workers.train.protocol import TrainState


class CriticEngine(ModelEngine):
    """A value model with its optimizer.

    Args:
        value_clip: reward units that a value may move before its loss is clipped; 0 is off.
    """

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
        """Take one optimizer step on the loss of all ranks' response tokens, or skip it.

        For ``aggregation`` and its ``max_response_tokens`` see ``algorithms/aggregate.py``.
        """

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
