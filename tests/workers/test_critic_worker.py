"""The critic's worker in one process with the policy's, through several sleeps; no Ray needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.algorithms.advantages.gae import gae
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import PhaseError
from hybridrl.single_controller import Worker
from hybridrl.trainer.advantages import Targets
from hybridrl.trainer.train_batch import build_critic_batch
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.train.protocol import TrainState
from tests.config.values import config_of
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.train.engines import make_rows, to_rollouts

PROMPTS = make_prompts((4, 9, 5))
SAMPLING = sampling_params(group=2, tokens=6)


def _fuse(config: ExperimentConfig, folder: Path) -> tuple[ActorRolloutWorker, CriticWorker]:
    """Build both as a ``WorkerHost`` does, in the order of their roles."""
    workers: dict[str, Worker] = {}
    classes: list[tuple[str, Any]] = [("actor", ActorRolloutWorker), ("critic", CriticWorker)]
    for prefix, cls in classes:
        worker = cls.__new__(cls, config, folder)
        worker.fused = workers
        workers[prefix] = worker
        cls.__init__(worker, config, folder)
    actor, critic = workers["actor"], workers["critic"]
    assert isinstance(actor, ActorRolloutWorker)
    assert isinstance(critic, CriticWorker)
    return actor, critic


def _three_cycles(rank: int, folder: Path, config: ExperimentConfig) -> None:
    actor, critic = _fuse(config, folder)
    engine = critic._engine
    for cycle in range(3):
        with actor.sharding.rollout_phase() as rollout_engine:
            assert rollout_engine is not None
            assert not any(engine.resident_bytes(part) for part in TrainState)
            with pytest.raises(PhaseError, match="the rollout engine holds the device"):
                critic.compute_values(to_rollouts(make_rows(2)))
        rollouts = actor.generate(PROMPTS, SAMPLING)
        assert rollouts is not None
        assert engine.resident_bytes(TrainState.PARAMETERS) > 0
        assert bool(engine.resident_bytes(TrainState.OPTIMIZER)) == (cycle > 0)
        values_BL = critic.compute_values(rollouts).values_BL
        assert bool(values_BL.values().any()) == (cycle > 0)
        rewards_BL = torch.ones_like(values_BL)
        estimate = gae(rewards_BL, values_BL, rollouts.response_mask_BL)
        targets = Targets(estimate.advantages_BL, estimate.returns_BL, charged={})
        metrics = critic.update(build_critic_batch(rollouts, values_BL, targets))
        assert metrics.get("critic/updates", metrics["critic/lr"]).value > 0
        assert {"time/critic_values_s", "time/critic_update_s"} <= set(metrics)
        peaks = {f"memory/{name}_peak_bytes/max" for name in ("sync", "values", "critic_update")}
        assert peaks <= set(metrics)  # told each step, also where the policy does not learn yet
    critic.close()
    actor.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fused_critic_leaves_the_device_in_each_rollout_phase_and_learns_after_it(
    tmp_path: Path, num_ranks: int
) -> None:
    config = config_of(
        "algorithm=ppo",
        "rollout.sleep=true",
        "rollout.max_response_tokens=6",
        "data.max_digits=4",
        "critic.num_minibatches=2",
        "trainer.num_prompts_per_step=3",
        "rollout.num_responses_per_prompt=2",
    )
    config = replace(
        config,
        cluster=replace(config.cluster, num_ranks_per_node=num_ranks),
        rollout=replace(config.rollout, num_slots=4, stage_timeout_s=30.0),
    )
    run_ranks(num_ranks, _three_cycles, make_tiny_model(tmp_path / "model"), config)
