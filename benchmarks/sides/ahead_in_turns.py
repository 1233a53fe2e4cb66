"""A run that samples K steps ahead in one process: engine and trainer take turns.

A real run with engines of their own has the same drawn prompts, loss and update; how old its rows
are depends on which half is slower. Here each row has the age that it has if the trainer is the
slower half: K steps, and as many as there were before it in the first ones. So curves of a given
age can be compared, and repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from benchmarks.sides.one_rank import build_worker, stand_alone
from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.display import LiveView
from hybridrl.run.loops import open_rl
from hybridrl.run.record import RunFolder
from hybridrl.run.workers import Workers
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller import WorkerGroup
from hybridrl.workers.actor_rollout import ActorRolloutWorker

_AHEAD = (
    *("serving=own", "serving.num_devices_per_node=1"),
    "serving.models.policy.groups.main.num_devices=1",
)


@dataclass
class SamplingInTurns:
    """The policy of a run: a worker whose engine samples every prompt when it is admitted."""

    worker: ActorRolloutWorker
    num_prompts: int
    """P, of a batch."""

    _batches: deque[RolloutBatch] = field(default_factory=deque)

    def exchange(self, prompts: PromptBatch | None, sampling: SamplingParams) -> RolloutBatch:
        if prompts is not None:
            rollouts = self.generate(prompts, sampling)
            version = int(rollouts.policy_version_B[0])
            rollouts.weight_versions_BL = torch.full_like(rollouts.token_ids_BL, version)
            self._batches.extend(rollouts.chunk(len(prompts) // self.num_prompts))
        return self._batches.popleft()

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        rollouts = self.worker.generate(prompts, sampling)
        if rollouts is None:
            raise TypeError("the worker has no engine")
        return rollouts

    def __getattr__(self, name: str) -> object:
        return getattr(self.worker, name)


@dataclass
class Recorded:
    """Keeps the metrics of all steps in memory."""

    rows: list[dict[str, float]] = field(default_factory=list)
    live: LiveView = field(default_factory=lambda: LiveView(0))

    def record(self, step: int, metrics: Metrics) -> None:
        self.rows.append({"step": step, **{name: one.value for name, one in metrics.items()}})

    def samples(self, *_: object) -> None:
        """Keep none."""


def train_in_turns(words: Sequence[str]) -> Recorded:
    """Train ``model.path`` in this process; a ``trainer.max_staleness`` needs a correction, too."""
    words = [*words, "trainer.run_dir=unused"]
    in_step = [word for word in words if not word.startswith("trainer.max_staleness=")]
    config = load_config(compose(in_step))
    model = Path(str(config.model.path))
    torch.set_num_threads(1)
    stand_alone()
    worker = build_worker("actor", ActorRolloutWorker, config, model, fused={})
    if len(words) > len(in_step):
        config = load_config(compose([*words, *_AHEAD]))
    policy = SamplingInTurns(worker, config.trainer.num_prompts_per_step)
    recorded = Recorded()
    with open_rl(config, model, cast(RunFolder, recorded)) as training:
        training.loop_of(Workers(actor=cast(WorkerGroup, policy))).run()
    worker.close()
    if recorded.rows[-1]["step"] < config.trainer.num_steps:
        raise KeyboardInterrupt("a signal stopped the training")  # an unfinished run is not kept
    return recorded
