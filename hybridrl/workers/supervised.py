"""The worker of supervised fine-tuning: the policy's training engine alone."""

from __future__ import annotations

from pathlib import Path

from hybridrl.batch import SupervisedBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Mean, Metrics
from hybridrl.single_controller import Dispatch, register
from hybridrl.workers.actor_rollout import TRAIN_METRICS
from hybridrl.workers.build import build_train_engine
from hybridrl.workers.checkpointed import CheckpointedWorker
from hybridrl.workers.process_group import end_process_group, start_process_group
from hybridrl.workers.train.protocol import LearningEngine


class SupervisedWorker(CheckpointedWorker):
    """One rank of a model that learns from examples."""

    def __init__(self, config: ExperimentConfig, model_folder: Path) -> None:
        """Start the training engine from a Hugging Face folder; a collective call."""
        device = start_process_group(
            device=config.cluster.device,
            local_rank=self.local_rank,
            timeout_s=config.cluster.collective_timeout_s,
        )
        self._engine = build_train_engine(config, model_folder, device)
        self.start_checkpoints(seed=config.seed)
        self.register_train_mesh(self._engine)

    @register(TRAIN_METRICS)
    def fit(self, batch: SupervisedBatch) -> Metrics:
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

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, atomically."""
        self._engine.export_hf(folder)

    def checkpointed_engine(self) -> LearningEngine:
        """Return the engine."""
        return self._engine

    @register(Dispatch.ONE_TO_ALL)
    def export_adapter(self, folder: Path) -> None:
        """Write the model's adapter as a peft folder, atomically."""
        self._engine.export_adapter(folder)

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        end_process_group()
