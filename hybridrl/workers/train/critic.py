"""The critic's training engine on FSDP2: packed, summed and stepped as the policy's.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridrl.batch import CriticBatch, RolloutBatch, ValueBatch
from hybridrl.config.critic import CriticConfig
from hybridrl.config.model import ModelConfig
from hybridrl.metrics import Metrics
from hybridrl.models.dtypes import DTYPES
from hybridrl.models.packed_model import PackedTokens
from hybridrl.models.value import ValueModel
from hybridrl.workers.train.gradient_steps import GradientSteps, Learner
from hybridrl.workers.train.optimizer import GuardedAdamW
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.sharded import ShardedModel
from hybridrl.workers.train.shards import build_critic
from hybridrl.workers.train.value_rows import value_share


class FSDP2Critic(Learner, ShardedModel[ValueModel]):
    """The critic with its optimizer; a ``CriticEngine``.

    Args:
        model_folder: Hugging Face folder of a language model; the value head begins as zeros.
        config: types, token budget, optimizer, clip.
        model_config: storage type and attention kernel.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        device: where the model computes.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    optimizer: GuardedAdamW
    """Moments, and the number of steps taken."""

    def __init__(
        self,
        model_folder: Path,
        *,
        config: CriticConfig,
        model_config: ModelConfig,
        num_total_steps: int,
        device: torch.device,
    ) -> None:
        def build(num_ranks: int) -> ValueModel:
            return build_critic(
                model_folder,
                config=config,
                dtype=DTYPES[model_config.dtype],
                device=device,
                num_ranks=num_ranks,
            )

        super().__init__(
            model_folder, build, config=config, model_config=model_config, device=device
        )
        self._value_clip = config.value_clip
        self._steps = GradientSteps(
            self.model,
            config=config,
            num_total_steps=num_total_steps,
            ranks=self._ranks,
            device=device,
            area="critic",
        )
        self.optimizer = self._steps.optimizer

    def compute_values(self, rows: RolloutBatch) -> ValueBatch:
        """Value the state before each response token of this rank's rows; lies on the host."""
        self._require("compute_values()", TrainState.PARAMETERS)

        def score(tokens: PackedTokens) -> tuple[Tensor]:
            return (self.model(tokens),)

        [values_BL] = self._score_rows(rows.token_ids_BL, rows.response_mask_BL, score)
        return ValueBatch(values_BL=values_BL, batch_size=rows.batch_size)

    def update(self, batch: CriticBatch) -> Metrics:
        """Take one optimizer step on the mean loss over all ranks' response tokens."""
        self._require("update()", *TrainState)

        def loss_share(pack: Pack, weights_S: Tensor) -> tuple[Tensor, Metrics]:
            return value_share(
                batch,
                pack,
                values_S=self.model(pack.tokens),
                weights_S=weights_S,
                value_clip=self._value_clip,
            )

        return self._steps.take(
            self._packing.cut(batch.token_ids_BL, batch.response_mask_BL),
            loss_share,
            aggregation="token_mean",
            max_response_tokens=1,
        )

    def _state(self, part: TrainState) -> list[Tensor]:
        return super()._state(part) + self._steps.tensors(part)
