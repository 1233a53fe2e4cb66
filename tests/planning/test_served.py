"""Memory where rollout servers have devices of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.planning.fit import Fit, find_fits, find_misfits
from hybridrl.planning.plan import MemoryItem, MemoryPlan, Phase
from hybridrl.planning.rollout import plan_servers
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B

GPUS = (
    *("rollout=sglang", "cluster=one_gpu", "cluster.device_memory_gib=80"),
    *("rollout.dtype=bfloat16", "rollout.memory_fraction=0.5", "model.starter=null"),
)
GROUPS = (
    "serving.models={policy: {groups: {wide: {num_devices: 4, devices_per_engine: 4}, "
    "gap: {num_devices: 1, worker_type: placeholder}, narrow: {num_devices: 3}}}}",
    "serving.num_devices_per_node=8",
)
RANK = MemoryPlan("cuda", (Phase("update", (MemoryItem("gradients", 2**30),)),))


def fits_of(*overrides: str) -> list[Fit]:
    return list(find_fits(config_of(*overrides), RANK))


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (*GPUS, f"model.path={tmp_path}")


@pytest.mark.shows("4.2", "4.10")
def test_a_device_of_a_server_has_its_share_of_the_model(given: tuple[str, ...]) -> None:
    config = config_of(*given, *GROUPS)
    (first, wide), (second, narrow) = plan_servers(config)
    assert (first.name, second.name) == ("wide", "narrow")
    assert narrow.weights == 4 * wide.weights == 2 * 8_190_735_360
    for memory in (wide, narrow):
        assert memory.weights + memory.kv_cache == 40 * 2**30
    of_servers = [str(fit) for fit in find_fits(config, RANK) if fit.name.startswith("servers")]
    assert [line.split()[1] for line in of_servers] == ["policy.wide", "policy.narrow"]
    assert all("Fits" in line for line in of_servers)


def test_a_device_of_a_server_that_is_too_small_is_refused(given: tuple[str, ...]) -> None:
    sizes = ("cluster.num_ranks_per_node=8", "rollout.memory_fraction=0.99")
    config = config_of(*given, *GROUPS, *sizes, "serving.num_devices_per_node=8")
    errors = find_misfits(config, find_fits(config, RANK))
    named = [" ".join(error.rule.split()[:2]) for error in errors]
    assert named == ["servers policy.wide", "servers policy.narrow"]
    assert all("rollout.memory_fraction=0.9" in str(error) for error in errors)


def test_without_servers_a_plan_says_nothing_of_them(given: tuple[str, ...]) -> None:
    assert list(plan_servers(config_of(*given))) == []


@pytest.mark.shows("4.3")
def test_engines_of_ranks_are_in_the_memory_of_ranks_alone(given: tuple[str, ...]) -> None:
    mixed = (
        *("cluster.num_ranks_per_node=4", "serving.num_devices_per_node=5", "rollout.sleep=true"),
        *("serving.colocated=true", "serving.models={policy: {groups: {}}}"),
        "serving.models.policy.groups={fused: {num_devices: 4}, own: {num_devices: 1}}",
    )
    assert [group.name for group, _ in plan_servers(config_of(*given, *mixed))] == ["own"]
    names = [fit.name for fit in fits_of(*given, *mixed)]
    assert names[:2] == ["peak of a rank", "a rank's engine"]
