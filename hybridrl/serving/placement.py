"""GPUs, addresses and ports of engines, as processes on their devices see them."""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group_table

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import HALVES
from hybridrl.errors import ResourceError
from hybridrl.network import LOOPBACK, host_and_port
from hybridrl.serving.plan import EnginePlan, GroupPlan, ServerPlan
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
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
    def address(self) -> KeyedAddress:
        """Where other engines reach it."""
        listeners = self.listeners
        return KeyedAddress(
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


_NUM_DIST_INIT = 31
"""Consecutive ports that SGLang counts up from the port of ``dist_init_addr``: 30, and one for each
data-parallel rank of an engine, of which there is one."""

_LAST_PORT = 65_535


class PortCursor:
    """Deals out the free ports of one node, upwards, each once."""

    def __init__(self, node: str, *, first: int, is_free: Callable[[int], bool]) -> None:
        """Begin at a port.

        Args:
            node: address, for messages.
            first: lowest port to deal out.
            is_free: whether nothing listens on a port of the node.
        """
        self._node = node
        self._next = self._first = first
        self._is_free = is_free

    def take(self, count: int = 1) -> int:
        """Take consecutive ports; return the lowest.

        Raises:
            ResourceError: not so many are free in a row.
        """
        begin = end = self._next
        while end - begin < count:
            if end > _LAST_PORT:
                raise ResourceError(
                    f"node {self._node} has no {count} free ports in a row from {self._first} on; "
                    "end what listens there"
                )
            end += 1
            if not self._is_free(end - 1):
                begin = end
        self._next = end
        return begin


@dataclass(frozen=True, slots=True)
class EngineListeners:
    """Where the processes of one engine meet and listen."""

    hosts: tuple[str, ...]
    """Address of each of its nodes."""

    port: int
    """Of HTTP, on the first node."""

    nccl_ports: tuple[int, ...]
    """One on each node."""

    dist_init_port: int
    """First of the consecutive ports of the rendezvous, on the first node."""

    bootstrap_port: int | None
    """Where decode engines fetch the entries of a prefill engine, on the first node; None for other
    types."""

    @property
    def url(self) -> str:
        """Base URL of HTTP."""
        return f"http://{host_and_port(self.hosts[0], self.port)}"

    @property
    def dist_init_addr(self) -> str:
        """Address of the rendezvous of its processes."""
        return host_and_port(self.hosts[0], self.dist_init_port)


def assign_addresses(
    group: GroupPlan,
    hosts: Sequence[str],
    cursors: Mapping[str, PortCursor],
) -> tuple[EngineListeners, ...]:
    """Give each engine of a group its addresses and ports, in order.

    Args:
        hosts: address of each node, by the node's index.
        cursors: of each address; shared by all groups, so that no port is dealt out twice.

    Raises:
        ResourceError: a node lacks free ports.
    """

    def address_of(engine: EnginePlan) -> EngineListeners:
        of_engine = tuple(hosts[part.node] for part in engine.slices)
        first = cursors[of_engine[0]]
        return EngineListeners(
            hosts=of_engine,
            port=first.take(),
            nccl_ports=tuple(cursors[host].take() for host in of_engine),
            dist_init_port=first.take(_NUM_DIST_INIT),
            bootstrap_port=first.take() if group.worker_type == "prefill" else None,
        )

    return tuple(address_of(engine) for engine in group.engines)


@dataclass(frozen=True, slots=True)
class ReservedNode:
    """Reserved resources of one process. If their node is lost, Ray looks for another one."""

    reservation: Any
    """Ray's placement group; the resources of all its bundles lie on one node."""

    host: str
    """Address of the node that it was on when the run started."""

    wait_s: float
    """Seconds to wait for another node that joins the cluster."""

    def missing(self) -> Future[None]:
        """Return a future that fails if there is no node for the process; else it never ends.

        Raises:
            ResourceError: by the future: names the lost node, and what to do.
        """
        answer: Future[None] = Future()

        def watch() -> None:
            try:
                # Ray drops the fraction
                has_node = bool(self.reservation.wait(math.ceil(self.wait_s)))
            except Exception as error:  # Ray has no class for a reservation that it dropped
                answer.set_exception(error)
                return
            if not has_node:
                answer.set_exception(self._error())

        threading.Thread(target=watch, name="reserved node", daemon=True).start()
        return answer

    def _error(self) -> ResourceError:
        return ResourceError(
            f"its node {self.host} is lost, and no other one has free resources for it: none "
            f"joined within cluster.start_timeout_s={self.wait_s:g} s. Start Ray there again, "
            "or on another one, and resume the run; or resume it with fewer devices: "
            "serving.num_devices_per_node, cluster.num_nodes, and num_devices of the groups"
        )


def find_reserved_nodes(
    placements: Sequence[Mapping[str, Any]], *, wait_s: float
) -> dict[int, ReservedNode]:
    """Return the nodes of processes that Ray starts with these options, by their index.

    Those without a reservation have none. Ask while the nodes are there: afterwards nobody knows
    their addresses.

    Args:
        placements: options of each process.
        wait_s: see ``ReservedNode``.
    """
    strategies = {
        index: options["scheduling_strategy"]
        for index, options in enumerate(placements)
        if "scheduling_strategy" in options
    }
    if not strategies:
        return {}
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = {}
    for index, strategy in strategies.items():
        of_bundles = placement_group_table(strategy.placement_group)["bundles_to_node_id"]
        host = hosts[of_bundles[strategy.placement_group_bundle_index]]
        nodes[index] = ReservedNode(strategy.placement_group, host, wait_s)
    return nodes
