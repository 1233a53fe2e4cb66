"""Workers of modes that learn from a data set: a training engine alone."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import torch

from hybridrl.algorithms.load import require_part
from hybridrl.batch import PreferenceBatch, SupervisedBatch, response_lengths, row_sums
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.errors import ConfigError
from hybridrl.metrics import Mean, Metrics
from hybridrl.single_controller import Dispatch, register
from hybridrl.workers.actor_rollout import TRAIN, TRAIN_METRICS
from hybridrl.workers.build import build_reference_engine, build_reward_trainer, build_train_engine
from hybridrl.workers.checkpointed import CheckpointedWorker, end_process_group
from hybridrl.workers.train.losses import PreferenceObjective, mean_over_pairs, of_held_out
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from hybridrl.workers.train.value_engines import RewardEngine


class OfflineWorker(CheckpointedWorker):
    """One rank of a model that samples nothing."""

    _engine: ModelEngine

    def __init__(self, config: ExperimentConfig, model_folder: Path) -> None:
        """Start the training engine from a Hugging Face folder; a collective call."""
        self._device = self.join_group(config)
        self._engine = self.build_engine(config, model_folder)
        self.start_work(self._engine, seed=config.seed)

    @abstractmethod
    def build_engine(self, config: ExperimentConfig, model_folder: Path) -> ModelEngine:
        """Start the engine on this rank's device; see ``workers/build.py``."""

    def checkpointed_engine(self) -> ModelEngine:
        """Return the engine."""
        return self._engine

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        end_process_group()


class _PolicyWorker(OfflineWorker):
    _engine: PolicyEngine

    def build_engine(self, config: ExperimentConfig, model_folder: Path) -> PolicyEngine:
        return build_train_engine(config, model_folder, self._device)

    @register(Dispatch.ONE_TO_ALL)
    def export_adapter(self, folder: Path) -> None:
        """Write the model's adapter as a peft folder, atomically."""
        self._engine.export_adapter(folder)


class SupervisedWorker(_PolicyWorker):
    """One rank of a model that learns from examples."""

    @register(TRAIN_METRICS)
    def update(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""
        return self._engine.fit(batch)

    @register(TRAIN_METRICS)
    def evaluate(self, batch: SupervisedBatch) -> Metrics:
        """Score held-out rows: the same loss, no step."""
        scored = self._engine.compute_logprobs(batch, temperature=1.0)
        if not self._engine.is_output_rank:
            return {}
        mask_T = batch.response_mask_BL.values()
        total = -scored.logprobs_BL.values()[mask_T].sum().item()
        return {"eval/loss_nats": Mean(total, float(mask_T.sum()))}


class PreferenceWorker(_PolicyWorker):
    """One rank of a model that learns from preference pairs."""

    def __init__(self, config: ExperimentConfig, model_folder: Path) -> None:
        """Start the training engine, and the reference if the loss reads it; a collective call."""
        super().__init__(config, model_folder)
        self._objective = PreferenceObjective(
            require_part(config.dpo, parts.PREFERENCE_LOSS), config.dpo.sft_coefficient
        )
        self._reference = build_reference_engine(
            config, model_folder, self._device, actor=self._engine
        )

    @register(TRAIN)
    def compute_reference(self, batch: PreferenceBatch) -> torch.Tensor:
        """Return the reference's log-prob of each answer, float32 [B] nats."""
        if self._reference is None:
            rule = "reads no log-ratios, so that no reference is loaded"
            raise ConfigError("dpo.loss", self._objective.loss.spelled, rule, "do not ask for it")
        return _answer_logprobs(self._reference, batch)

    @register(TRAIN_METRICS)
    def update(self, batch: PreferenceBatch) -> Metrics:
        """Take one optimizer step on the mean loss of the pairs."""
        return self._engine.fit_pairs(batch, self._objective)

    @register(TRAIN_METRICS)
    def evaluate(self, batch: PreferenceBatch) -> Metrics:
        """Score held-out pairs that have a response mask: the same loss and metrics, no step."""
        policy_P2 = _answer_logprobs(self._engine, batch).view(-1, 2)
        reference_B = None if self._reference is None else self.compute_reference(batch)
        lengths_P2 = response_lengths(batch.response_mask_BL).view(-1, 2)
        counted_P = lengths_P2[:, 0] > 0
        if not self._engine.is_output_rank or not counted_P.any():
            return {}
        reference_P2 = None if reference_B is None else reference_B.view(-1, 2)[counted_P]
        policy_P2 = policy_P2[counted_P]
        _, values = self._objective(policy_P2, reference_P2, lengths_P2[counted_P])
        metrics = mean_over_pairs(values, torch.ones(len(policy_P2)))
        return of_held_out(metrics)


def _answer_logprobs(
    model: PolicyEngine | BaseModelReference, batch: PreferenceBatch
) -> torch.Tensor:
    return row_sums(model.compute_logprobs(batch, temperature=1.0).logprobs_BL)


class RewardModelWorker(OfflineWorker):
    """One rank of a reward model that learns from preference pairs."""

    _engine: RewardEngine

    def build_engine(self, config: ExperimentConfig, model_folder: Path) -> RewardEngine:
        """Start the engine, with the head of the folder or one of zeros."""
        return build_reward_trainer(config, model_folder, self._device)

    @register(TRAIN_METRICS)
    def update(self, batch: PreferenceBatch) -> Metrics:
        """Take one optimizer step on the mean loss of the pairs."""
        return self._engine.fit_pairs(batch)

    @register(TRAIN_METRICS)
    def evaluate(self, batch: PreferenceBatch) -> Metrics:
        """Score held-out pairs: the same loss and metrics, no step."""
        return self._engine.evaluate_pairs(batch)
