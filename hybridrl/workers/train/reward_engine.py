"""A reward model on any training back end: one score for each conversation.

Legend: B conversations, L tokens of a row, S scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridrl.batch import RewardBatch, SupervisedBatch, row_offsets
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.backend import Backend
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.protocol import TrainState


class RewardEngine(ModelEngine):
    """A value model that is read at the last token of a conversation.

    Args:
        backend: of a reward model.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, area="reward_model")

    def compute_rewards(self, rows: SupervisedBatch) -> RewardBatch:
        """Score this rank's conversations, as ``data/conversations.py`` lays them out."""
        self._require("compute_rewards()", TrainState.PARAMETERS)
        [values_BL] = self._compute_columns(rows, _compute, num_columns=1)
        rewards_B = values_BL.values()[row_offsets(values_BL)[1:] - 1]
        return RewardBatch(rewards_B=rewards_B.to(torch.float32), batch_size=rows.batch_size)


def _compute(model: nn.Module, tokens: PackedTokens) -> Tensor:
    values: Tensor = model(tokens)
    return values
