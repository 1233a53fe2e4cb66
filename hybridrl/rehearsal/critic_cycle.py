"""The steps of a critic's own rank, executed on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.rehearsal.cycle import Cycle, Meter, Rows, join, rows_of_two_microbatches
from hybridrl.rehearsal.gpu import FakeGpu
from hybridrl.rehearsal.plan import Executed
from hybridrl.rehearsal.torch_cuda import GPU
from hybridrl.trainer.advantages import Targets
from hybridrl.trainer.train_batch import build_critic_batch
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.train.protocol import TrainState


class CriticCycle(Cycle):
    """A rank that has the critic alone."""

    def __init__(self, config: ExperimentConfig, gpu: FakeGpu) -> None:
        super().__init__(config, gpu)
        num_rows = rows_of_two_microbatches(
            config,
            config.critic.max_tokens_per_microbatch,
            num_parts=config.num_critic_groups * config.critic.num_minibatches,
        )
        self._rows = Rows(num_rows, 1)
        self._meter = Meter(gpu, self.executed, GPU)

    def run(self, *, num_steps: int = 2) -> Executed:
        """Build the rank, and take steps."""
        join(self.config.num_critic_ranks, 0)
        with self._meter("build"):
            worker: Any = CriticWorker.__new__(CriticWorker)
            worker.__init__(self.config, self._folder)
        backend = worker._engine.backend
        rollouts = self._rows_of_others(self._prompts(), version=0)
        zeros_BL = torch.zeros_like(rollouts.sampler_logprobs_BL)
        for _ in range(num_steps):
            with self._meter("values"):
                values_BL = worker.compute_values(rollouts).values_BL
            batch = build_critic_batch(rollouts, values_BL, Targets(zeros_BL, zeros_BL, {}))
            with self._meter("critic_update"):
                worker.update(batch)
            self._gpu.name(backend.tensors(TrainState.OPTIMIZER), "optimizer")
            self._gpu.name(backend.tensors(TrainState.PARAMETERS), "critic weights")
        return self.executed
