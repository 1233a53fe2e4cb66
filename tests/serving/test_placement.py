"""GPUs and ports that engines get, from what the processes on their devices say."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ResourceError
from hybridrl.run.modes.check import rehearsed_configs
from hybridrl.serving.launching import Device, Place, free_row, look_at, place_engines
from hybridrl.serving.plan import plan_servers
from hybridrl.single_controller import RayResourcePool
from hybridrl.workers.engine_settings import driver_variables
from hybridrl.workers.rollout.sglang.arguments import build_arguments, server_spec
from hybridrl.workers.rollout.sglang.process import is_port_free
from tests.config.values import config_of
from tests.sglang.topologies import groups

TWO_NODES = (
    *("rollout=sglang", "cluster.num_nodes=2", "cluster.ray_address=auto"),
    "serving.num_devices_per_node=4",
)


def places_of(config: ExperimentConfig, *, has_ports: bool = True) -> dict[int, Place]:
    per_node = config.serving.num_devices_per_node
    devices = [
        Device(f"fd00::{node}", str(gpu), 20_000 + 200 * gpu if has_ports else None)
        for node in range(config.cluster.num_nodes)
        for gpu in range(per_node)
    ]
    all_groups = [group for plan in plan_servers(config) for group in plan.groups]
    return place_engines(all_groups, devices)


@pytest.mark.shows("4.7", "4.8", "4.9")
def test_each_node_of_an_engine_has_its_gpus_and_the_common_port() -> None:
    config = config_of(
        *TWO_NODES,
        groups(
            narrow="num_devices: 4, devices_per_engine: 2",
            rest="num_devices: 4, devices_per_engine: 4",
        ),
    )
    places = places_of(config)
    assert {first: place.gpus_of_nodes for first, place in places.items()} == {
        0: (("0", "1"),),
        2: (("2", "3"),),
        4: (("0", "1", "2", "3"),),
    }
    assert places[0].node_arguments(0) == {}
    spread = groups(main="num_devices: 8, devices_per_engine: 8")
    place = places_of(config_of(*TWO_NODES, spread))[0]
    assert place.gpus_of_nodes == (("0", "1", "2", "3"),) * 2
    first, second = (place.node_arguments(rank) for rank in range(2))
    assert first["dist_init_addr"] == second["dist_init_addr"]
    assert str(first["dist_init_addr"]).startswith("[fd00::0]:")
    assert (first["nnodes"], first["node_rank"], second["node_rank"]) == (2, 0, 1)
    with pytest.raises(ResourceError, match="node fd00::0 has no 34 free ports in a row"):
        places_of(config_of(*TWO_NODES, spread), has_ports=False)


def test_an_engine_on_two_nodes_of_one_machine_is_told_of_both() -> None:
    config = config_of(*TWO_NODES, groups(main="num_devices: 8, devices_per_engine: 8"))
    devices = [Device("fd00::1", str(gpu), 20_000 + 200 * gpu) for gpu in range(8)]
    engines = [group for plan in plan_servers(config) for group in plan.groups]
    place = place_engines(engines, devices)[0]
    first, second = (place.node_arguments(rank) for rank in range(2))
    assert (first["nnodes"], first["node_rank"], second["node_rank"]) == (2, 0, 1)
    assert len({place.address.port, place.dist_init_port, *place.nccl_ports}) == 4


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')


def arguments_of(*overrides: str) -> Iterator[dict[str, object]]:
    for _, config in rehearsed_configs(config_of(*overrides)):
        spec = server_spec(config, Path("model"))
        yield build_arguments(spec, name="name", port=1, key="key")


@pytest.mark.shows("4.3")
def test_an_engine_that_never_sleeps_saves_no_memory() -> None:
    cuda = ("cluster=one_gpu", "rollout=sglang", "rollout.dtype=bfloat16")
    mixed = groups(wide="num_devices: 2, devices_per_engine: 2", narrow="num_devices: 2")
    wide, narrow = arguments_of(*cuda, mixed, "serving.num_devices_per_node=4")
    assert (wide["tp_size"], narrow["tp_size"]) == (2, 1)
    assert wide["enable_memory_saver"] is narrow["enable_memory_saver"] is False


def test_a_decode_engine_reserves_no_more_than_a_response() -> None:
    halves = groups(
        a="num_devices: 1, worker_type: prefill", b="num_devices: 1, worker_type: decode"
    )
    given = ("rollout=sglang", "serving.num_devices_per_node=2", halves)
    first, second = arguments_of(*given, "rollout.max_response_tokens=30")
    assert (first["disaggregation_mode"], second["disaggregation_mode"]) == ("prefill", "decode")
    assert first["disaggregation_transfer_backend"] == "mooncake_tcp"
    assert second["num_reserved_decode_tokens"] == 30
    room = ("model.starter.max_position_embeddings=1024",)
    _, longer = arguments_of(*given, "rollout.max_response_tokens=900", *room)
    assert longer["num_reserved_decode_tokens"] == 512


@pytest.mark.shows("4.9")
def test_variables_of_the_driver_replace_those_of_other_nodes() -> None:
    environment = {"NCCL_DEBUG": "INFO", "SGLANG_LOG_MS": "1", "HOME": "/root", "PATH": "/bin"}
    across = config_of(*TWO_NODES, groups(main="num_devices: 8"))
    assert driver_variables(across, environment) == {"NCCL_DEBUG": "INFO", "SGLANG_LOG_MS": "1"}
    assert driver_variables(config_of("serving=own"), environment) == {}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.9")
def test_processes_of_engines_take_a_share_of_their_devices() -> None:
    pool = RayResourcePool([2], num_cpus_per_rank=1.0)
    placements = pool.lease()
    try:
        assert [options["num_cpus"] for options in placements] == [0.1, 0.1]
        beside = [*placements, *placements]  # four processes on two devices of one CPU each
        devices = look_at(beside, timeout_s=60.0)
    finally:
        pool.give_back()
    assert {device.gpu for device in devices} == {""}
    assert len({device.host for device in devices}) == 1
    blocks = [range(device.first_port or 0, (device.first_port or 0) + 34) for device in devices]
    assert len({port for block in blocks for port in block}) == 4 * 34
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", blocks[0].start))
        assert not is_port_free(blocks[0].start)


def test_ports_of_an_engine_are_consecutive_ones_that_are_free() -> None:
    assert free_row(range(20_000, 20_034)) == 20_000
    assert free_row([20_000, *range(20_002, 20_100)]) == 20_002
    assert free_row(range(20_000, 20_033)) is free_row(range(20_000, 20_100, 2)) is None
