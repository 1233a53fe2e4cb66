"""The process of an engine under many calls at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.serving import launching
from hybridrl.serving.engine_process import RolloutProcess
from hybridrl.serving.launching import ActorLaunch
from hybridrl.serving.plan import ModelPlan, plan_servers
from tests.config.values import config_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _launch(config: ExperimentConfig, plan: ModelPlan, folder: Path) -> ActorLaunch:
    return ActorLaunch(
        config=config,
        plan=plan,
        policy_folder=folder,
        placements=[{"num_cpus": 0}] * config.num_own_server_devices,
    )


def test_an_engine_is_probed_however_many_requests_it_has(tmp_path: Path) -> None:
    config = config_of("serving=own", "rollout.num_slots=1100")
    (plan,) = plan_servers(config)
    group = plan.groups[0]
    launch = _launch(config, plan, tmp_path)
    engine = launch(group, group.engines[0])
    try:
        for _ in range(config.rollout.num_slots):
            engine._actor.live.remote()  # never ends, as a long request
        assert isinstance(engine.probe().exception(60), AttributeError)  # nothing is built
    finally:
        engine.end()


class _Asked(RolloutProcess):
    async def seed(self) -> int:
        return self._config.seed


def test_engines_of_a_model_draw_other_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "RolloutProcess", _Asked)
    config = config_of("serving=own", "serving.num_devices_per_node=2")
    (plan,) = plan_servers(config)
    launch = _launch(config, plan, tmp_path)
    engines = [launch(group, engine) for group in plan.groups for engine in group.engines]
    try:
        seeds = ray.get([engine._actor.seed.remote() for engine in engines])
        assert seeds == [config.seed, config.seed + 1]
    finally:
        for engine in engines:
            engine.end()
