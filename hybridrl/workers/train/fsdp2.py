"""The policy's training engine on PyTorch's FSDP2: gloo on CPUs, NCCL on GPUs, or one process.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridrl.batch import TrainBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import ModelConfig
from hybridrl.metrics import Metrics
from hybridrl.workers.train.gradient_steps import GradientSteps, Learner
from hybridrl.workers.train.optimizer import GuardedAdamW
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.policy_engine import LearningPolicy
from hybridrl.workers.train.policy_rows import count_pack, loss_inputs
from hybridrl.workers.train.protocol import TokenLoss, TrainState, WeightSet
from hybridrl.workers.train.scorer import FSDP2Scorer
from hybridrl.workers.train.shards import Adapt


class FSDP2Engine(LearningPolicy, Learner, FSDP2Scorer):
    """The policy with its optimizer; a ``TrainEngine``.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size, optimizer.
        model_config: storage type and attention kernel.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        device: where the model computes.
        adapt: changes the model before it is loaded; what it freezes does not learn.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    weight_parts: tuple[WeightSet, ...] = (WeightSet.BASE,)
    """Passes of a weight sync; see ``TrainEngine.weight_parts``."""

    _is_trainable = True

    optimizer: GuardedAdamW
    """Moments, and the number of steps taken."""

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        num_total_steps: int,
        device: torch.device,
        adapt: Adapt | None = None,
    ) -> None:
        super().__init__(
            model_folder, config=config, model_config=model_config, device=device, adapt=adapt
        )
        self._steps = GradientSteps(
            self.model,
            config=config,
            num_total_steps=num_total_steps,
            ranks=self._ranks,
            device=device,
            area="policy",
        )
        self.optimizer = self._steps.optimizer

    def update(
        self,
        batch: TrainBatch,
        *,
        loss: TokenLoss,
        aggregation: str,
        temperature: float,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows; see ``TrainEngine.update``."""
        self._require("update()", *TrainState)

        def loss_share(pack: Pack, weights_S: Tensor) -> tuple[Tensor, Metrics]:
            logprobs_S, entropy_S = self.model(
                pack.tokens, temperature, needs_entropy_gradient=loss.needs_entropy_gradient
            )
            inputs = loss_inputs(
                batch,
                pack,
                weights_S=weights_S,
                current_logprobs_S=logprobs_S,
                entropy_S=entropy_S,
            )
            share, metrics = loss(inputs)
            return share, metrics | count_pack(pack)

        return self._steps.take(
            self._packing.cut(batch.token_ids_BL, batch.response_mask_BL),
            loss_share,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )

    def _state(self, part: TrainState) -> list[Tensor]:
        return super()._state(part) + self._steps.tensors(part)
