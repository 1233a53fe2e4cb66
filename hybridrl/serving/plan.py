"""The layout of rollout servers on devices and nodes: pure functions of the configuration.

Devices of all servers are counted through, node by node; groups take them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup, WorkerType
from hybridrl.errors import ResourceError


@dataclass(frozen=True, slots=True)
class NodeSlice:
    """Devices of one engine on one node."""

    node: int
    """Index of the node."""

    first_device: int
    """Index on the node."""

    num_devices: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine: the devices that share it."""

    first_device: int
    """Index among the devices of all servers."""

    num_devices: int

    slices: tuple[NodeSlice, ...]
    """By node. The process on the first one answers requests; the others follow it."""

    url: str = ""
    """Of a server that others run, and which then has the devices; empty: the run starts it."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Equal engines on adjacent devices."""

    name: str
    worker_type: WorkerType
    first_device: int
    num_devices: int

    num_nodes_per_engine: int
    """Nodes that an engine lies on."""

    needs_offload: bool
    """Whether the engines are those of the ranks, and give their memory back while the trainer
    computes: they use its devices. Others never do, and their memory need not be releasable."""

    engines: tuple[EnginePlan, ...]
    """Empty for a placeholder, which uses up its devices all the same."""

    @property
    def answers(self) -> bool:
        """Whether requests for responses go to the engines: the others only do a share of them."""
        return self.worker_type in ("regular", "decode")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The engines of one model."""

    model: str
    groups: tuple[GroupPlan, ...]

    @property
    def engines(self) -> tuple[EnginePlan, ...]:
        """Engines of all groups; each is one process that answers, on its first node."""
        return tuple(engine for group in self.groups for engine in group.engines)

    def engines_of_type(self, worker_type: WorkerType) -> tuple[EnginePlan, ...]:
        """Engines of the groups of one type."""
        groups = [group for group in self.groups if group.worker_type == worker_type]
        return tuple(engine for group in groups for engine in group.engines)

    @property
    def num_nodes_per_engine(self) -> int:
        """Nodes that each engine lies on.

        Raises:
            ResourceError: groups differ in it.
        """
        of_groups = {g.name: g.num_nodes_per_engine for g in self.groups if g.engines}
        if len(set(of_groups.values())) != 1:
            sizes = ", ".join(f"{name}: {count}" for name, count in of_groups.items())
            raise ResourceError(
                f"engines of server {self.model} do not lie on equally many nodes ({sizes}); "
                "ask each group instead"
            )
        return next(iter(of_groups.values()))


def lay_out(
    groups: Sequence[PlacedGroup], *, num_devices_per_node: int, num_shared_per_node: int
) -> tuple[ServerPlan, ...]:
    """Lay groups over devices and nodes.

    Args:
        groups: in order, those of one model adjacent; checked by ``config/checks/serving.py``.
        num_devices_per_node: devices of servers on each node.
        num_shared_per_node: devices of each node that the trainer uses, too, and takes back in
            turns; the first ones. 0 if servers have devices of their own.
    """
    return tuple(
        ServerPlan(
            model,
            tuple(
                _lay_out_group(group, per_node=num_devices_per_node, num_shared=num_shared_per_node)
                for group in of_model
            ),
        )
        for model, of_model in groupby(groups, key=lambda group: group.model)
    )


def plan_servers(config: ExperimentConfig) -> tuple[ServerPlan, ...]:
    """Lay the groups of a run over the devices of its servers."""
    serving = config.serving
    return lay_out(
        serving.placed_groups,
        num_devices_per_node=serving.num_devices_per_node,
        num_shared_per_node=config.num_shared_per_node,
    )


def plan_own_engines(config: ExperimentConfig) -> tuple[ServerPlan, ...]:
    """Lay out the groups that are not engines of the ranks. A model may be left without groups.

    Servers of the policy that others run are a group without devices.
    """
    own = tuple(
        replace(plan, groups=tuple(group for group in plan.groups if not group.needs_offload))
        for plan in plan_servers(config)
    )
    policy = config.serving.policy
    if policy not in config.serving.external:
        return own
    return (ServerPlan(policy, (_elsewhere(config.serving.models[policy].urls),)), *own)


def _elsewhere(urls: Sequence[str]) -> GroupPlan:
    return GroupPlan(
        name="urls",
        worker_type="regular",
        first_device=0,
        num_devices=0,
        num_nodes_per_engine=0,
        needs_offload=False,
        engines=tuple(EnginePlan(0, 0, (), url) for url in urls),
    )


def _lay_out_group(group: PlacedGroup, *, per_node: int, num_shared: int) -> GroupPlan:
    config, per_engine = group.config, group.config.devices_per_engine
    firsts = range(group.first_device, group.first_device + config.num_devices, per_engine)
    return GroupPlan(
        name=group.name,
        worker_type=config.worker_type,
        first_device=group.first_device,
        num_devices=config.num_devices,
        num_nodes_per_engine=-(-per_engine // per_node),
        needs_offload=group.first_device % per_node < num_shared,
        engines=tuple(
            EnginePlan(first, per_engine, _slices(first, per_engine, per_node=per_node))
            for first in firsts[: config.num_engines]
        ),
    )


def _slices(first_device: int, num_devices: int, *, per_node: int) -> tuple[NodeSlice, ...]:
    end = first_device + num_devices
    return tuple(
        NodeSlice(
            node,
            max(first_device - node * per_node, 0),
            min(end, (node + 1) * per_node) - max(first_device, node * per_node),
        )
        for node in range(first_device // per_node, -(-end // per_node))
    )
