"""The process of an engine under many calls at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.serving.launching import ActorLaunch, ServerDevices
from hybridrl.serving.plan import plan_servers
from tests.config.values import config_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_an_engine_is_probed_however_many_requests_it_has(tmp_path: Path) -> None:
    config = config_of("serving=own", "rollout.num_slots=1100")
    (plan,) = plan_servers(config)
    group = plan.groups[0]
    launch = ActorLaunch(
        config=config,
        plan=plan,
        policy_folder=tmp_path,
        devices=ServerDevices(placements=[{"num_cpus": 0}] * config.num_server_devices),
    )
    engine = launch(group, group.engines[0])
    try:
        for _ in range(config.rollout.num_slots):
            engine._actor.live.remote()  # never ends, as a long request
        assert isinstance(engine.probe().exception(60), AttributeError)  # nothing is built
    finally:
        engine.end()
