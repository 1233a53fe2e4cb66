"""The policy's training engine on PyTorch's FSDP2: gloo on CPUs, NCCL on GPUs, or one process.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridrl.batch import SupervisedBatch, TrainBatch, jagged_from, row_lengths
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import ModelConfig
from hybridrl.errors import ModelError
from hybridrl.metrics import Metrics, Sum
from hybridrl.workers.train.gradient_steps import GradientSteps, Learner
from hybridrl.workers.train.losses import SupervisedLoss
from hybridrl.workers.train.optimizer import GuardedAdamW
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.protocol import TokenLoss, TokenLossInputs, TrainState, WeightPart
from hybridrl.workers.train.scorer import FSDP2Scorer
from hybridrl.workers.train.shards import Adapt


class FSDP2Engine(Learner, FSDP2Scorer):
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

    weight_parts: tuple[WeightPart, ...] = (WeightPart.BASE,)
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
            scored = self.model(
                pack.tokens, temperature, needs_entropy_gradient=loss.needs_entropy_gradient
            )
            share, metrics = loss(self._loss_inputs(batch, pack, weights_S, *scored))
            return share, metrics | _count_pack(pack)

        return self._steps.take(
            self._packing.cut(batch.token_ids_BL, batch.response_mask_BL),
            loss_share,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )

    def fit(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""
        nothing_BL = jagged_from(
            torch.zeros(batch.token_ids_BL.values().shape), row_lengths(batch.token_ids_BL)
        )
        rows = TrainBatch(
            token_ids_BL=batch.token_ids_BL,
            response_mask_BL=batch.response_mask_BL,
            advantages_BL=nothing_BL,
            sampler_logprobs_BL=nothing_BL,
            batch_size=batch.batch_size,
        )
        return self.update(
            rows,
            loss=SupervisedLoss(),
            aggregation="token_mean",
            temperature=1.0,
            max_response_tokens=1,
        )

    def export_adapter(self, folder: Path) -> None:
        """Refuse: the whole policy learned, so there is no adapter.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"cannot write {folder}: this policy has no adapter; export the whole of it, or train "
            "with lora.enabled=true"
        )

    def _tensors(self, part: TrainState) -> list[Tensor]:
        return super()._tensors(part) + self._steps.tensors(part)

    def _loss_inputs(
        self, batch: TrainBatch, pack: Pack, weights_S: Tensor, *scored_S: Tensor
    ) -> TokenLossInputs:
        """Lay the batch's columns beside the current log-probs and entropies, both [S]."""
        current_S, entropy_S = scored_S

        def at_scored(column_BL: Tensor) -> Tensor:
            return column_BL.values()[pack.place_S].to(self._device)

        old_BL, reference_BL = batch.old_logprobs_BL, batch.reference_logprobs_BL
        return TokenLossInputs(
            current_logprobs_T=current_S,
            entropy_T=entropy_S,
            weights_T=weights_S,
            advantages_T=at_scored(batch.advantages_BL),
            sampler_logprobs_T=at_scored(batch.sampler_logprobs_BL),
            old_logprobs_T=current_S.detach() if old_BL is None else at_scored(old_BL),
            reference_logprobs_T=None if reference_BL is None else at_scored(reference_BL),
        )


def _count_pack(pack: Pack) -> Metrics:
    if not len(pack.place_S):
        return {}
    return {
        "data/train_tokens": Sum(len(pack.tokens.token_ids_T)),
        "data/loss_tokens": Sum(len(pack.place_S)),
        "data/microbatches": Sum(1),
    }
