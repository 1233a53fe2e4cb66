"""The layout of rollout servers: devices are counted node by node, and groups take them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup, WorkerType


@dataclass(frozen=True, slots=True)
class PlannedDevices:
    """One engine: the devices that share it."""

    nodes: tuple[range, ...]
    """Its devices on each of its nodes, counted over all servers. The process on the first node
    answers requests; the others follow it."""

    url: str = ""
    """Of a server that others run, and which then has the devices; empty: the run starts it."""

    @property
    def first_device(self) -> int:
        """Index of its first device."""
        return self.nodes[0].start

    @property
    def num_devices(self) -> int:
        """Devices on all nodes."""
        return sum(map(len, self.nodes))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Equal engines on adjacent devices."""

    name: str
    worker_type: WorkerType

    needs_offload: bool
    """Whether the engines are those of the ranks, and give their memory back while the trainer
    computes: they use its devices. Others never do, and their memory need not be releasable."""

    engines: tuple[PlannedDevices, ...]
    """Empty for a placeholder, which uses up its devices all the same."""

    @property
    def answers(self) -> bool:
        """Whether requests for responses go to the engines: the others only do a share of them."""
        return self.worker_type in ("regular", "decode")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The engines of one model."""

    model: str
    groups: tuple[GroupPlan, ...]

    @property
    def engines(self) -> tuple[PlannedDevices, ...]:
        """Engines of all groups; each is one process that answers, on its first node."""
        return tuple(engine for group in self.groups for engine in group.engines)


def lay_out(
    groups: Sequence[PlacedGroup], *, num_devices_per_node: int, num_shared_per_node: int
) -> tuple[ModelPlan, ...]:
    """Lay groups over devices and nodes; the trainer shares the first devices of each node."""

    def lay_out_group(group: PlacedGroup) -> GroupPlan:
        size, first = group.config.devices_per_engine, group.first_device
        engines = [
            range(begin, begin + size)
            for begin in range(first, first + size * group.config.num_engines, size)
        ]
        return GroupPlan(
            name=group.name,
            worker_type=group.config.worker_type,
            needs_offload=first % num_devices_per_node < num_shared_per_node,
            engines=tuple(
                PlannedDevices(_by_node(devices, num_devices_per_node)) for devices in engines
            ),
        )

    return tuple(
        ModelPlan(model, tuple(map(lay_out_group, of_model)))
        for model, of_model in groupby(groups, key=lambda group: group.model)
    )


def _by_node(devices: range, per_node: int) -> tuple[range, ...]:
    return tuple(
        range(max(devices.start, node * per_node), min(devices.stop, (node + 1) * per_node))
        for node in range(devices.start // per_node, -(-devices.stop // per_node))
    )


def plan_servers(config: ExperimentConfig) -> tuple[ModelPlan, ...]:
    """Lay the groups of a run over the devices of its servers."""
    serving = config.serving
    return lay_out(
        serving.placed_groups,
        num_devices_per_node=serving.num_devices_per_node,
        num_shared_per_node=config.num_shared_per_node,
    )


def plan_own_engines(config: ExperimentConfig) -> tuple[ModelPlan, ...]:
    """Lay out all groups but those of the ranks; servers that others run have no devices."""
    return tuple(
        replace(plan, groups=tuple(group for group in plan.groups if not group.needs_offload))
        for plan in plan_servers(config)
    ) + tuple(
        ModelPlan(name, (_elsewhere(model.urls),))
        for name, model in config.serving.external.items()
    )


def _elsewhere(urls: Sequence[str]) -> GroupPlan:
    engines = tuple(PlannedDevices((), url) for url in urls)
    return GroupPlan("urls", "regular", needs_offload=False, engines=engines)
