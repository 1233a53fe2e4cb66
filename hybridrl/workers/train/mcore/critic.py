"""The critic's training engine on megatron-core: packed, summed and stepped as the policy's.

Legend: S scored (response) tokens.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

from hybridrl.batch import CriticBatch, RolloutBatch, ValueBatch
from hybridrl.config.critic import CriticConfig
from hybridrl.metrics import Metrics
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.mcore.architecture import Architecture
from hybridrl.workers.train.mcore.learner import StagedLearner
from hybridrl.workers.train.mcore.megatron_core import TransformerConfig
from hybridrl.workers.train.mcore.model import CriticStage
from hybridrl.workers.train.mcore.parallel import Parallel
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.value_rows import value_share


class MegatronCritic(StagedLearner):
    """The critic with its optimizer; a ``CriticEngine``.

    Args:
        model_folder: Hugging Face folder of a language model; the value head begins as zeros.
        config: types, token budget, optimizer, clip.
        setting: parallel sizes and device: those of the policy, in whose process it may be.
        num_total_steps: optimizer steps of the run, where the schedule ends.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: see ``StagedModel``.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        config: CriticConfig,
        setting: MegatronContext,
        num_total_steps: int,
    ) -> None:
        super().__init__(
            model_folder,
            _critic_stage,
            config=config,
            setting=setting,
            num_total_steps=num_total_steps,
            area="critic",
        )
        self._value_clip = config.value_clip

    def compute_values(self, rows: RolloutBatch) -> ValueBatch:
        """Value the state before each response token of this rank's rows; lies on the host."""
        self._require("compute_values()", TrainState.PARAMETERS)
        [values_BL] = self.compute_rows(
            rows.token_ids_BL, rows.response_mask_BL, _forward, num_columns=1
        )
        return ValueBatch(values_BL=values_BL, batch_size=rows.batch_size)

    def update(self, batch: CriticBatch) -> Metrics:
        """Take one optimizer step on the mean loss over all ranks' response tokens."""
        self._require("update()", *TrainState)

        def loss_share(pack: Pack, values_S: Tensor, weights_S: Tensor) -> tuple[Tensor, Metrics]:
            return value_share(
                batch, pack, values_S=values_S, weights_S=weights_S, value_clip=self._value_clip
            )

        return self._take_step(
            self._packing.cut(batch.token_ids_BL, batch.response_mask_BL),
            _forward,
            loss_share,
            aggregation="token_mean",
            max_response_tokens=1,
        )

    def _configs(self) -> list[Configuration]:
        config = AutoConfig.from_pretrained(self._folder, local_files_only=True, num_labels=1)
        config.dtype = self._transformer.params_dtype
        classifier = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
        config.architectures = [classifier.__name__]
        return [config]


def _forward(stage: nn.Module, pack: Pack) -> Tensor:
    values: Tensor = stage(pack.tokens)
    return values


def _critic_stage(
    transformer: TransformerConfig,
    architecture: Architecture,
    parallel: Parallel,
    vp_stage: int | None,
) -> CriticStage:
    return CriticStage(transformer, architecture, parallel=parallel, vp_stage=vp_stage)
