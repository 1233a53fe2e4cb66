"""The critic's worker: in the policy's processes, or in a pool of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.algorithms.load import require_part
from hybridrl.batch import CriticBatch, RolloutBatch, ValueBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.single_controller import register
from hybridrl.workers import profiler
from hybridrl.workers.actor_rollout import TRAIN, TRAIN_METRICS, ActorRolloutWorker
from hybridrl.workers.build import build_critic_engine
from hybridrl.workers.checkpointed import CheckpointedWorker, end_process_group
from hybridrl.workers.train.value_engines import CriticEngine


class CriticWorker(CheckpointedWorker):
    """One rank of the critic. Its calls do not block the driver: they give futures.

    Fused with an ``ActorRolloutWorker`` (role ``actor``) its training state shares the device, and
    leaves it while the rollout engine has it. Calls to both then run in turn, in order.
    """

    def __init__(self, config: ExperimentConfig, model_folder: Path) -> None:
        """Start the engine from the policy's Hugging Face folder; a collective call."""
        device = self.join_group(config)
        self._config = config.critic
        self._aggregation = require_part(config.algorithm, parts.AGGREGATION)
        self._max_response_tokens = config.rollout.max_response_tokens
        self._engine = build_critic_engine(config, model_folder, device)
        actor = self.fused.get("actor")
        self._sharding = actor.sharding if isinstance(actor, ActorRolloutWorker) else None
        if self._sharding is not None:
            self._sharding.register("critic", self._engine)
        self._seconds: Metrics = {}
        self.start_work(self._engine, seed=config.seed)

    @register(TRAIN, blocking=False)
    def compute_values(self, rollouts: RolloutBatch) -> ValueBatch:
        """Value the state before each response token, with the weights before the update."""
        with self._working("values", stage="values"):
            return self._engine.compute_values(rollouts)

    @register(TRAIN_METRICS, blocking=False)
    def update(self, batch: CriticBatch) -> Metrics:
        """Take all optimizer steps; this rank's rows of each mini-batch are adjacent."""
        with self._working("update", stage="critic_update"):
            steps = [
                self._engine.update(
                    minibatch,
                    aggregation=self._aggregation,
                    max_response_tokens=self._max_response_tokens,
                )
                for _ in range(self._config.num_epochs)
                for minibatch in batch.chunk(self._config.num_minibatches)
            ]
        seconds, self._seconds = self._seconds, {}
        # What the device's manager measured up to now. The policy's update returns the others; in
        # warm-up steps there is none.
        shared = {} if self._sharding is None else self._sharding.take_metrics()
        return merge([*steps, seconds, shared])

    def checkpointed_engine(self) -> CriticEngine:
        """Return the critic's engine, whose export is for token classification."""
        self._require_device()
        return self._engine

    def close(self) -> None:
        """Leave the process group, unless it is the policy's."""
        super().close()
        if self._sharding is None:
            end_process_group()

    def _require_device(self) -> None:
        if self._sharding is not None:
            self._sharding.require_training()

    @contextmanager
    def _working(self, what: str, *, stage: str) -> Iterator[None]:
        """Refuse to compute while the rollout engine has the device; measure seconds and memory.

        A profile names the stage, on ranks of the critic's own, too.
        """
        self._require_device()
        begin = time.perf_counter()
        named = profiler.of_process.named if self._sharding is None else self._sharding.meter
        with named(stage):
            yield
        self._seconds[f"time/critic_{what}_s"] = Max(time.perf_counter() - begin)
