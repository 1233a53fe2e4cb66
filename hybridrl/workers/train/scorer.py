"""A policy on FSDP2 that scores tokens: the reference, and the part of the actor that it shares."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import ModelConfig
from hybridrl.models.dtypes import DTYPES
from hybridrl.models.packed_model import PackedTokens
from hybridrl.models.policy import PolicyModel
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.sharded import ShardedModel
from hybridrl.workers.train.shards import Adapt, build_policy


class FSDP2Scorer(ShardedModel[PolicyModel]):
    """A model that scores tokens and does not learn, as the reference policy; a ``ScoringEngine``.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size.
        model_config: storage type and attention kernel.
        device: where the model computes.
        adapt: changes the model before it is loaded.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    _is_trainable = False

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        device: torch.device,
        adapt: Adapt | None = None,
    ) -> None:
        def build(num_ranks: int) -> PolicyModel:
            return build_policy(
                model_folder,
                config=config,
                dtype=DTYPES[model_config.dtype],
                device=device,
                num_ranks=num_ranks,
                is_trainable=self._is_trainable,
                adapt=adapt,
            )

        super().__init__(
            model_folder, build, config=config, model_config=model_config, device=device
        )

    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows; see ``ScoringEngine.compute_logprobs``. Values lie on the host.

        Temperature divides the logits. Both columns are 0 where the mask is False.
        """
        self._require("compute_logprobs()", TrainState.PARAMETERS)

        def score(tokens: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs_S, entropies_S = self.model(tokens, temperature)
            return logprobs_S, entropies_S

        logprobs_BL, entropy_BL = self._score_rows(rows.token_ids_BL, rows.response_mask_BL, score)
        return ScoreBatch(
            logprobs_BL=logprobs_BL, entropy_BL=entropy_BL, batch_size=rows.batch_size
        )
