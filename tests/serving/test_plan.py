"""Layout of groups, against devices that are counted one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.load import load_config
from hybridrl.config.serving import ServedModelConfig, ServerGroupConfig, ServingConfig
from hybridrl.config.topology import Attached, Colocated, Own
from hybridrl.main import compose
from hybridrl.network import host_and_port
from hybridrl.serving.launching import Device, find_places, place_engines
from hybridrl.serving.plan import (
    ModelPlan,
    PlannedDevices,
    lay_out,
    plan_own_engines,
    plan_servers,
)
from hybridrl.workers.build import led_engines
from tests.config.values import config_of

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


def plans_of(serving: ServingConfig, num_shared: int = 0) -> tuple[ModelPlan, ...]:
    return lay_out(
        serving.placed_groups,
        num_devices_per_node=serving.num_devices_per_node,
        num_shared_per_node=num_shared,
    )


def devices_of(engine: PlannedDevices, per_node: int) -> list[int]:
    for part in engine.nodes:
        assert part.start // per_node == part[-1] // per_node  # one node
    return [number for part in engine.nodes for number in part]


@pytest.mark.shows("4.2")
@given(serving=servings(), num_shared=st.integers(0, 40))
def test_groups_take_the_devices_one_after_the_other(
    serving: ServingConfig, num_shared: int
) -> None:
    first_free, per_node = 0, serving.num_devices_per_node
    by_model = {plan.model: plan for plan in plans_of(serving, num_shared)}
    for name, model in serving.models.items():
        groups = by_model[name].groups if model.groups else ()
        for plan, (group_name, group) in zip(groups, model.groups.items(), strict=True):
            taken = range(first_free, first_free + group.num_devices)
            first_free += group.num_devices
            size = group.devices_per_engine
            engines = [list(taken[at : at + size]) for at in range(0, len(taken), size)]
            if group.worker_type == "placeholder":
                engines = []
            assert [devices_of(e, serving.num_devices_per_node) for e in plan.engines] == engines
            assert plan.name == group_name
            assert plan.needs_offload == (taken[0] % per_node < num_shared)


@pytest.mark.shows("4.4")
@given(serving=servings())
def test_an_engine_answers_on_its_first_node(serving: ServingConfig) -> None:
    for plan in plans_of(serving):
        for group in plan.groups:
            for engine in group.engines:
                assert engine.first_device == engine.nodes[0].start
                assert engine.num_devices == sum(len(part) for part in engine.nodes)
                assert len(engine.nodes) == len(group.engines[0].nodes)


@pytest.mark.shows("4.3")
def test_groups_on_devices_of_the_trainer_are_offloaded() -> None:
    groups = {name: ServerGroupConfig(num_devices=2) for name in "abcd"}
    model = ServedModelConfig(groups=groups)
    serving = ServingConfig(num_devices_per_node=4, colocated=True, models={"m": model})
    for num_shared, offloaded in {0: "", 2: "ac", 4: "abcd"}.items():
        (plan,) = plans_of(serving, num_shared=num_shared)  # on two nodes
        assert "".join(group.name for group in plan.groups if group.needs_offload) == offloaded


@pytest.mark.shows("4.3")
def test_groups_of_the_ranks_have_no_processes_of_the_manager() -> None:
    config = load_config(compose(["recipes=cpu/mixed"]))
    assert [group.name for group in plan_servers(config)[0].groups] == ["main", "own"]
    (own,) = plan_own_engines(config)
    assert [engine.first_device for engine in own.engines] == [1]
    (led,) = led_engines(config)
    assert config.topology == Colocated((led,), has_others=True)
    assert (led.ranks, led.folder) == (range(1), None)
    assert (config.num_devices, config.num_own_server_devices) == (2, 1)
    config = load_config(compose(["recipes=cpu/colocated"]))
    assert plan_own_engines(config)[0].engines == ()
    assert config.topology == Colocated(led_engines(config), has_others=False)
    assert [led.ranks for led in led_engines(config)] == [range(1), range(1, 2)]
    assert (config.num_devices, config.num_own_server_devices) == (2, 0)
    config = load_config(compose(["serving=own"]))
    assert plan_own_engines(config) == plan_servers(config)
    assert config.topology == Own()


@pytest.mark.shows("4.7")
@given(serving=servings())
def test_no_port_of_a_node_is_given_twice(serving: ServingConfig) -> None:
    per_node = serving.num_devices_per_node
    devices = [Device(f"10.0.0.{n // per_node}", "", 1000 + 34 * n) for n in range(300)]
    groups = [group for plan in plans_of(serving) for group in plan.groups]
    places = place_engines(groups, devices)
    assert list(places) == [engine.first_device for g in groups for engine in g.engines]
    taken: dict[str, list[range]] = {device.host: [] for device in devices}
    for group in groups:
        for engine in group.engines:
            place = places[engine.first_device]
            hosts = [devices[part.start].host for part in engine.nodes]
            assert place.address.host == hosts[0]
            first = taken[hosts[0]]
            first.append(range(place.address.port, place.address.port + 1))
            first.append(range(place.dist_init_port, place.dist_init_port + 31))
            entries_port = place.address.bootstrap_port
            assert (entries_port is None) == (group.worker_type != "prefill")
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
    assert [(group.answers, group.needs_offload) for group in plan.groups] == [(True, False)]
    assert find_places(config, [plan], ()) == {}
    assert config.topology == Attached()
    assert config.samples_ahead
    assert config.serving.router == "none"
    assert config.num_own_server_devices == 0
    assert config.num_devices == config.cluster.num_ranks
