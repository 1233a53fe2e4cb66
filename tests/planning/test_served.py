"""Memory where rollout servers have devices of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.planning.page import plan_page
from hybridrl.planning.served import plan_servers
from hybridrl.planning.suggestions import find_misfits
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B
from tests.planning.test_memory import plan_of

GPUS = (
    *("rollout=sglang", "cluster=one_gpu", "cluster.device_memory_gib=80"),
    *("rollout.dtype=bfloat16", "rollout.memory_fraction=0.5", "model.starter=null"),
)
GROUPS = (
    "serving.models={policy: {groups: {wide: {num_devices: 4, devices_per_engine: 4}, "
    "gap: {num_devices: 1, worker_type: placeholder}, narrow: {num_devices: 3}}}}",
    "serving.num_devices_per_node=8",
)
OF_ENGINES = {"rollout weights", "KV cache", "sampling", "SGLang itself", "SGLang's processes"}


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (*GPUS, f"model.path={tmp_path}")


@pytest.mark.shows("4.2", "4.10")
def test_a_rank_has_no_memory_of_servers(given: tuple[str, ...]) -> None:
    assert not OF_ENGINES.intersection(plan_of(*given, *GROUPS).item_names)
    fused = plan_of(*given)
    assert OF_ENGINES - {"sampling"} < set(fused.item_names)
    served = plan_of(*given, *GROUPS)
    assert served.peak_bytes(served.fullest) < fused.peak_bytes(fused.fullest)


def test_a_device_of_a_server_has_its_share_of_the_model(given: tuple[str, ...]) -> None:
    config = config_of(*given, *GROUPS)
    (first, wide), (second, narrow) = plan_servers(config)
    assert (first.name, second.name) == ("wide", "narrow")
    assert narrow.weights == 4 * wide.weights == 2 * 8_190_735_360
    for memory in (wide, narrow):
        assert memory.weights + memory.kv_cache == 40 * 2**30
    page = plan_page(config)
    assert "servers policy.wide " in page
    of_servers = [line for line in page.splitlines() if line.startswith("servers")]
    assert all("Fits" in line for line in of_servers)


def test_a_device_of_a_server_that_is_too_small_is_refused(given: tuple[str, ...]) -> None:
    sizes = ("cluster.num_ranks_per_node=8", "rollout.memory_fraction=0.99")
    errors = find_misfits(config_of(*given, *GROUPS, *sizes, "serving.num_devices_per_node=8"))
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
    fused = plan_of(*given, "cluster.num_ranks_per_node=4", "rollout.sleep=true")
    served = plan_of(*given, *mixed)
    assert served.item_names == fused.item_names
    assert served.peak_bytes(served.fullest) == fused.peak_bytes(fused.fullest)
