"""GPUs, addresses and ports of engines, as processes on their devices see them."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import HALVES
from hybridrl.errors import ResourceError
from hybridrl.network import LOOPBACK
from hybridrl.serving.plan import EnginePlan, GroupPlan, ServerPlan
from hybridrl.serving.ports import EngineListeners, PortCursor, assign_addresses
from hybridrl.workers.rollout.sglang.arguments import ServerAddress
from hybridrl.workers.rollout.sglang.process import is_port_free

_PORTS = range(20_000, 31_000)
_NUM_PORTS = 1_000
"""Probed on each node. An engine takes less than 40."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the servers."""

    host: str
    """Address of its node in the cluster."""

    gpu: str
    """Name that other processes of its node use; empty on a CPU."""

    free_ports: tuple[int, ...]
    """Ports of its node without a listener, in rising order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlace:
    """Devices and ports of one engine. An engine that replaces it gets the same."""

    gpus_of_nodes: tuple[tuple[str, ...], ...]
    """GPUs on each of its nodes, by ``Device.gpu``."""

    listeners: EngineListeners

    key: str
    """Of the servers of this run that others reach."""

    @property
    def address(self) -> ServerAddress:
        """Where other engines reach it."""
        listeners = self.listeners
        return ServerAddress(
            host=listeners.hosts[0],
            port=listeners.port,
            key=self.key,
            bootstrap_port=listeners.bootstrap_port,
        )

    def node_arguments(self, node_rank: int) -> dict[str, str | int]:
        """Return SGLang's arguments for one of several nodes; none for an engine on one node."""
        num_nodes = len(self.gpus_of_nodes)
        if num_nodes == 1:
            return {}
        return {
            "nnodes": num_nodes,
            "node_rank": node_rank,
            "dist_init_addr": self.listeners.dist_init_addr,
            "nccl_port": self.listeners.nccl_ports[node_rank],
        }


def find_places(
    config: ExperimentConfig,
    plans: Sequence[ServerPlan],
    placements: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, str],
) -> dict[int, EnginePlace]:
    """Ask the devices of all servers for their GPUs and free ports.

    Args:
        placements: options of Ray for a process on each device of the servers.
        variables: environment of the processes.

    Returns:
        Places by the first device of the engine; empty if each engine is a process that has a
        device of its own and talks to nobody.

    Raises:
        ResourceError: a device does not answer, or its node lacks free ports.
    """
    groups = [group for plan in plans for group in plan.groups if group.num_devices]
    if not any(map(_needs_places, groups)):
        return {}
    environment = {"env_vars": dict(variables)} if variables else {}
    devices = look_at(
        [{**options, "runtime_env": environment} for options in placements],
        timeout_s=config.cluster.start_timeout_s,
    )
    return place_engines(groups, devices, per_node=config.serving.num_devices_per_node)


def _needs_places(group: GroupPlan) -> bool:
    return group.worker_type in HALVES or any(e.num_devices > 1 for e in group.engines)


def place_engines(
    groups: Sequence[GroupPlan], devices: Sequence[Device], *, per_node: int
) -> dict[int, EnginePlace]:
    """Give each engine its devices and ports; see ``assign_addresses``.

    Args:
        devices: of all servers, in order.
        per_node: devices of servers on each node.
    """
    hosts = [device.host for device in devices[::per_node]]
    if len(hosts) == 1:
        hosts = [LOOPBACK]
    cursors = {
        host: PortCursor(
            host,
            first=min(device.free_ports, default=_PORTS.stop),
            is_free=set(device.free_ports).__contains__,
        )
        for host, device in zip(hosts, devices[::per_node], strict=True)
    }
    key = secrets.token_urlsafe()

    def gpus_of(engine: EnginePlan) -> tuple[tuple[str, ...], ...]:
        begins = [part.node * per_node + part.first_device for part in engine.slices]
        return tuple(
            tuple(device.gpu for device in devices[begin : begin + part.num_devices])
            for begin, part in zip(begins, engine.slices, strict=True)
        )

    return {
        engine.first_device: EnginePlace(
            gpus_of_nodes=gpus_of(engine), listeners=listeners, key=key
        )
        for group in groups
        for engine, listeners in zip(
            group.engines, assign_addresses(group, hosts, cursors), strict=True
        )
    }


def look_at(placements: Sequence[Mapping[str, Any]], *, timeout_s: float) -> tuple[Device, ...]:
    """Ask a process on each device for its node, its GPU and free ports.

    Args:
        placements: options of Ray for a process on each device.

    Raises:
        ResourceError: no answer in time.
    """
    task = ray.remote(_look)
    first = random.randrange(_PORTS.start, _PORTS.stop - _NUM_PORTS)
    answers = [
        task.options(**options).remote(range(first, first + _NUM_PORTS)) for options in placements
    ]
    try:
        return tuple(ray.get(answers, timeout=timeout_s))
    except GetTimeoutError as error:
        raise ResourceError(
            f"no process started on the {len(placements)} devices of the servers within "
            f"cluster.start_timeout_s={timeout_s:g} s"
        ) from error


def _look(ports: range) -> Device:
    gpus = ray.get_gpu_ids()  # by the names of CUDA_VISIBLE_DEVICES
    return Device(
        host=ray.util.get_node_ip_address(),
        gpu=str(gpus[0]) if gpus else "",
        free_ports=tuple(port for port in ports if is_port_free(port)),
    )
