"""The worker that trains a reward model."""

from __future__ import annotations

from pathlib import Path

from hybridrl.batch import PreferenceBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Metrics
from hybridrl.single_controller import Dispatch, register
from hybridrl.workers.actor_rollout import TRAIN_METRICS
from hybridrl.workers.build import build_reward_trainer
from hybridrl.workers.checkpointed import CheckpointedWorker
from hybridrl.workers.process_group import end_process_group, start_process_group
from hybridrl.workers.train.protocol import LearningEngine


class RewardModelWorker(CheckpointedWorker):
    """One rank of a reward model that learns from preference pairs."""

    def __init__(self, config: ExperimentConfig, model_folder: Path) -> None:
        """Start the training engine from a Hugging Face folder; a collective call."""
        device = start_process_group(
            device=config.cluster.device,
            local_rank=self.local_rank,
            timeout_s=config.cluster.collective_timeout_s,
        )
        self._engine = build_reward_trainer(config, model_folder, device)
        self.start_checkpoints(seed=config.seed)
        self.register_train_mesh(self._engine)

    @register(TRAIN_METRICS)
    def update(self, batch: PreferenceBatch) -> Metrics:
        """Take one optimizer step on the mean loss of the pairs."""
        return self._engine.fit_pairs(batch)

    @register(TRAIN_METRICS)
    def evaluate(self, batch: PreferenceBatch) -> Metrics:
        """Score held-out pairs: the same loss and metrics, no step."""
        return self._engine.evaluate_pairs(batch)

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder (sequence classification), atomically."""
        self._engine.export_hf(folder)

    def checkpointed_engine(self) -> LearningEngine:
        """Return the engine."""
        return self._engine

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        end_process_group()
