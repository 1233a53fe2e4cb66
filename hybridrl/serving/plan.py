"""The layout of rollout servers: devices are counted node by node, and groups take them in turn."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup, WorkerType


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDevices:
    """One engine: the devices that share it."""

    nodes: tuple[range, ...] = ()
    """Its devices on each of its nodes, counted over all servers. The process on the first node
    answers requests; the others follow it."""

    group: str = ""
    """Name of its group."""

    worker_type: WorkerType = "regular"

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

    @property
    def answers(self) -> bool:
        """Whether requests for responses go to it: others only do a share of them."""
        return self.worker_type in ("regular", "decode")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The engines of one model."""

    model: str

    engines: tuple[PlannedDevices, ...]
    """Of all groups; each is one process that answers, on its first node."""


def engines_of(group: PlacedGroup, *, per_node: int) -> tuple[PlannedDevices, ...]:
    """Lay the engines of a group over the devices of its nodes; none of a placeholder."""
    size, first = group.config.devices_per_engine, group.first_device
    return tuple(
        PlannedDevices(
            nodes=_by_node(range(begin, begin + size), per_node),
            group=group.name,
            worker_type=group.config.worker_type,
        )
        for begin in range(first, first + size * group.config.num_engines, size)
    )


def _by_node(devices: range, per_node: int) -> tuple[range, ...]:
    return tuple(
        range(max(devices.start, node * per_node), min(devices.stop, (node + 1) * per_node))
        for node in range(devices.start // per_node, -(-devices.stop // per_node))
    )


def plan_own_engines(config: ExperimentConfig) -> tuple[ModelPlan, ...]:
    """Lay out all engines but those of the ranks; servers that others run have no devices."""
    serving = config.serving
    own = [group for group in serving.placed_groups if not config.is_on_trainer(group)]
    plans = []
    for name, model in serving.models.items():
        engines = [PlannedDevices(url=url) for url in model.urls]
        for group in own:
            if group.model == name:
                engines += engines_of(group, per_node=serving.num_devices_per_node)
        plans.append(ModelPlan(name, tuple(engines)))
    return tuple(plans)
