"""The worker that trains a reward model."""

from __future__ import annotations

from pathlib import Path

from hybridrl.batch import PreferenceBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Metrics
from hybridrl.single_controller import register
from hybridrl.workers.actor_rollout import TRAIN_METRICS
from hybridrl.workers.build import build_reward_trainer
from hybridrl.workers.offline import OfflineWorker
from hybridrl.workers.train.value_engines import RewardEngine


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
