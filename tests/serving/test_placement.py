from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.serving import PlacedGroup, ServedModelConfig, ServerGroupConfig, ServingConfig
from hybridrl.config.topology import Attached, Colocated, Own
from hybridrl.errors import ResourceError
from hybridrl.main import compose
from hybridrl.network import LOOPBACK, host_and_port
from hybridrl.run.modes.check import rehearsed_configs
from hybridrl.serving import launching
from hybridrl.serving.engine_process import RolloutProcess
from hybridrl.serving.launching import (
    ActorLaunch,
    Device,
    Place,
    find_places,
    free_row,
    look_at,
    place_engines,
)
from hybridrl.serving.plan import ModelPlan, PlannedDevices, engines_of, plan_own_engines
from hybridrl.single_controller import RayResourcePool
from hybridrl.workers.engine_settings import driver_variables
from hybridrl.workers.rollout.sglang.arguments import CONTEXT_SLACK, build_arguments, server_spec
from hybridrl.workers.rollout.sglang.process import is_port_free
from tests.config.values import config_of
from tests.sglang.topologies import groups

TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")


@st.composite
def servings(draw: st.DrawFn) -> ServingConfig:
    """Legal ones: sizes are powers of two in falling order, so no engine lies across two nodes."""
    per_node = 2 ** draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    groups = [
        ServerGroupConfig(
            num_devices=2**size * draw(st.integers(1, 3)),
            devices_per_engine=2**size,
            worker_type=draw(st.sampled_from(TYPES)),
        )
        for size in sorted(sizes, reverse=True)
    ]
    end = draw(st.integers(0, len(groups)))
    named = {f"g{number}": group for number, group in enumerate(groups)}
    models = {"policy": dict(list(named.items())[:end]), "judge": dict(list(named.items())[end:])}
    return ServingConfig(
        num_devices_per_node=per_node,
        colocated=True,
        models={name: ServedModelConfig(groups=groups) for name, groups in models.items()},
    )


def laid_out(serving: ServingConfig) -> list[tuple[PlacedGroup, tuple[PlannedDevices, ...]]]:
    per_node = serving.num_devices_per_node
    return [(group, engines_of(group, per_node=per_node)) for group in serving.placed_groups]


def all_engines(serving: ServingConfig) -> list[PlannedDevices]:
    return [engine for _, engines in laid_out(serving) for engine in engines]


def devices_of(engine: PlannedDevices, per_node: int) -> list[int]:
    for part in engine.nodes:
        assert part.start // per_node == part[-1] // per_node  # one node
    return [number for part in engine.nodes for number in part]


@pytest.mark.shows("4.2", "4.4")
@given(serving=servings())
def test_groups_take_the_devices_one_after_the_other(serving: ServingConfig) -> None:
    first_free, per_node = 0, serving.num_devices_per_node
    named = [(m, n, g) for m, model in serving.models.items() for n, g in model.groups.items()]
    for (placed, planned), (model, name, group) in zip(laid_out(serving), named, strict=True):
        assert placed == (model, name, group, first_free)
        taken = range(first_free, first_free + group.num_devices)
        first_free += group.num_devices
        size = group.devices_per_engine
        engines = [list(taken[at : at + size]) for at in range(0, len(taken), size)]
        if group.worker_type == "placeholder":
            engines = []
        assert [devices_of(engine, per_node) for engine in planned] == engines
        assert {(e.group, e.worker_type) for e in planned} <= {(name, group.worker_type)}
        assert [each.first_device for each in planned] == [engine[0] for engine in engines]
        assert {each.num_devices for each in planned} <= {size}
        assert len({len(each.nodes) for each in planned}) <= 1


@pytest.mark.shows("4.3")
def test_groups_on_devices_of_the_trainer_are_the_ranks() -> None:
    groups = {name: ServerGroupConfig(num_devices=2) for name in "abcd"}
    model = ServedModelConfig(groups=groups)
    config = config_of("cluster.num_nodes=2", "cluster.ray_address=auto")
    for num_shared, own in {0: "aabbccdd", 2: "bbdd", 4: ""}.items():
        serving = ServingConfig(
            num_devices_per_node=4, colocated=num_shared > 0, models={"m": model}
        )
        cluster = replace(config.cluster, num_ranks_per_node=max(1, num_shared))
        (plan,) = plan_own_engines(replace(config, serving=serving, cluster=cluster))
        assert "".join(engine.group for engine in plan.engines) == own


@pytest.mark.shows("4.3")
def test_groups_of_the_ranks_have_no_processes_of_the_manager() -> None:
    config = load_config(compose(["recipes=cpu/mixed"]))
    assert [group.name for group in config.serving.placed_groups] == ["main", "own"]
    (own,) = plan_own_engines(config)
    assert [engine.first_device for engine in own.engines] == [1]
    (led,) = config.topology.engines
    assert config.topology == Colocated((led,), has_others=True)
    assert (led.ranks, led.folder) == (range(1), None)
    assert (config.num_devices, config.num_own_server_devices) == (2, 1)
    config = load_config(compose(["recipes=cpu/colocated"]))
    assert plan_own_engines(config)[0].engines == ()
    assert config.topology == Colocated(config.topology.engines, has_others=False)
    assert [led.ranks for led in config.topology.engines] == [range(1), range(1, 2)]
    assert (config.num_devices, config.num_own_server_devices) == (2, 0)
    config = load_config(compose(["serving=own"]))
    assert plan_own_engines(config) == (ModelPlan("policy", tuple(all_engines(config.serving))),)
    assert config.topology == Own()


@pytest.mark.shows("4.7")
@given(serving=servings(), is_one_machine=st.booleans())
def test_no_port_of_a_node_is_given_twice(serving: ServingConfig, *, is_one_machine: bool) -> None:
    """Nodes of one machine are listened to on loopback, and share its ports."""
    per_node = serving.num_devices_per_node
    machines = [0 if is_one_machine else n // per_node for n in range(300)]
    devices = [Device(f"10.0.0.{each}", "", 1000 + 35 * n) for n, each in enumerate(machines)]
    engines = all_engines(serving)
    places = place_engines(engines, devices)
    assert list(places) == [engine.first_device for engine in engines]
    taken: dict[str, list[range]] = {device.host: [] for device in devices}
    for engine in engines:
        place = places[engine.first_device]
        hosts = [devices[part.start].host for part in engine.nodes]
        assert place.address.host == (LOOPBACK if is_one_machine else hosts[0])
        first = taken[hosts[0]]
        first.append(range(place.address.port, place.address.port + 1))
        first.append(range(place.encoders_port, place.encoders_port + 1))
        first.append(range(place.dist_init_port, place.dist_init_port + 31))
        entries_port = place.address.bootstrap_port
        assert (entries_port is None) == (engine.worker_type != "prefill")
        if entries_port is not None:
            first.append(range(entries_port, entries_port + 1))
        for host, port in zip(hosts, place.nccl_ports, strict=True):
            taken[host].append(range(port, port + 1))
    for spans in taken.values():
        ordered = sorted(spans, key=lambda span: span.start)
        assert all(before.stop <= after.start for before, after in pairwise(ordered))


@pytest.mark.shows("4.8")
def test_an_ipv6_host_is_in_brackets() -> None:
    assert host_and_port("fe80::1", 80) == host_and_port("[fe80::1]", 80) == "[fe80::1]:80"
    assert host_and_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert host_and_port("node-1", 80) == "node-1:80"


@pytest.mark.shows("4.23")
def test_servers_of_others_are_engines_without_devices() -> None:
    config = config_of(
        *("rollout=sglang", "serving.num_devices_per_node=0", "trainer.max_staleness=1"),
        "serving.models={policy: {urls: ['http://a:1', 'http://b:2']}}",
        "algorithm.rollout_correction=importance",
    )
    (plan,) = plan_own_engines(config)
    assert [engine.url for engine in plan.engines] == ["http://a:1", "http://b:2"]
    assert {engine.num_devices for engine in plan.engines} == {0}
    assert {engine.answers for engine in plan.engines} == {True}
    assert find_places(config, [plan], ()) == {}
    assert config.topology == Attached()
    assert config.samples_ahead
    assert config.serving.router == "none"
    assert config.num_own_server_devices == 0
    assert config.num_devices == config.cluster.num_ranks


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
    return place_engines(all_engines(config.serving), devices)


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
    with pytest.raises(ResourceError, match="node fd00::0 has no 35 free ports in a row"):
        places_of(config_of(*TWO_NODES, spread), has_ports=False)


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
def test_arguments_follow_from_sleep_and_from_the_kind_of_an_engine() -> None:
    cuda = ("cluster=one_gpu", "rollout=sglang", "rollout.dtype=bfloat16")
    mixed = groups(wide="num_devices: 2, devices_per_engine: 2", narrow="num_devices: 2")
    wide, narrow = arguments_of(*cuda, mixed, "serving.num_devices_per_node=4")
    assert (wide["tp_size"], narrow["tp_size"]) == (2, 1)
    assert wide["enable_memory_saver"] is narrow["enable_memory_saver"] is False
    halves = groups(
        a="num_devices: 1, worker_type: prefill", b="num_devices: 1, worker_type: decode"
    )
    given = ("rollout=sglang", "serving.num_devices_per_node=2", halves)
    first, second = arguments_of(*given, "rollout.max_response_tokens=30")
    assert (first["disaggregation_mode"], second["disaggregation_mode"]) == ("prefill", "decode")
    assert first["disaggregation_transfer_backend"] == "mooncake_tcp"
    assert second["num_reserved_decode_tokens"] == 30
    _, longer = arguments_of(*given, "rollout.max_response_tokens=900")
    assert longer["num_reserved_decode_tokens"] == 512
    evaluated = ("rollout.max_response_tokens=30", "eval.max_response_tokens=40")
    _, longer = arguments_of(*given, *evaluated)
    assert longer["num_reserved_decode_tokens"] == 40
    lengths = [each["context_length"] for each in (second, longer)]
    assert lengths == [24 + 30 + CONTEXT_SLACK, 24 + 40 + CONTEXT_SLACK]
    eyes = groups(eyes="num_devices: 1, worker_type: encoder", main="num_devices: 1")
    sees = ("model=starter_that_sees", "data=read_numbers", "serving.num_devices_per_node=2")
    encoder, language = arguments_of("rollout=sglang", *sees, eyes)
    assert (encoder["encoder_only"], "language_only" in encoder) == (True, False)
    assert (language["language_only"], "encoder_only" in language) == (True, False)
    assert language["encoder_urls"] == ["http://127.0.0.1:20000"]


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
    blocks = [range(device.first_port or 0, (device.first_port or 0) + 35) for device in devices]
    assert len({port for block in blocks for port in block}) == 4 * 35
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", blocks[0].start))
        assert not is_port_free(blocks[0].start)


def test_ports_of_an_engine_are_consecutive_ones_that_are_free() -> None:
    assert free_row(range(20_000, 20_035)) == 20_000
    assert free_row([20_000, *range(20_002, 20_100)]) == 20_002
    assert free_row(range(20_000, 20_034)) is free_row(range(20_000, 20_100, 2)) is None


def _launch(config: ExperimentConfig, plan: ModelPlan, folder: Path) -> ActorLaunch:
    return ActorLaunch(
        config=config,
        plan=plan,
        policy_folder=folder,
        placements=[{"num_cpus": 0}] * config.num_own_server_devices,
    )


@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_is_probed_however_many_requests_it_has(tmp_path: Path) -> None:
    config = config_of("serving=own", "rollout.num_slots=1100")
    (plan,) = plan_own_engines(config)
    engine = _launch(config, plan, tmp_path)(plan.engines[0])
    try:
        for _ in range(config.rollout.num_slots):
            engine._actor.live.remote()  # never ends, as a long request
        assert isinstance(engine.probe().exception(60), AttributeError)  # nothing is built
    finally:
        engine.end()


class _Asked(RolloutProcess):
    async def seed(self) -> int:
        return self._config.seed


@pytest.mark.usefixtures("ray_cluster")
def test_engines_of_a_model_draw_other_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "RolloutProcess", _Asked)
    config = config_of("serving=own", "serving.num_devices_per_node=2")
    (plan,) = plan_own_engines(config)
    launch = _launch(config, plan, tmp_path)
    engines = [launch(engine) for engine in plan.engines]
    try:
        seeds = ray.get([engine._actor.seed.remote() for engine in engines])
        assert seeds == [config.seed, config.seed + 1]
    finally:
        for engine in engines:
            engine.end()
