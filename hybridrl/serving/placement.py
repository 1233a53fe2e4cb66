"""GPUs, addresses and ports of engines, as processes on their devices see them."""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Mapping, Sequence
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
from hybridrl.serving.plan import EnginePlan, GroupPlan, ModelPlan
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.process import is_port_free

_PORTS = range(20_000, 31_000)
_NUM_PORTS = 1_000
"""Probed on each node. An engine takes less than 40."""

_NUM_DIST_INIT = 31
"""Consecutive ports that SGLang counts up from the port of ``dist_init_addr``: 30, and one for each
data-parallel rank of an engine, of which there is one."""


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
class Place:
    """Devices, addresses and ports of one engine. An engine that replaces it gets the same."""

    gpus_of_nodes: tuple[tuple[str, ...], ...]
    """GPUs on each of its nodes, by ``Device.gpu``."""

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

    key: str
    """Of the servers of this run that others reach."""

    @property
    def address(self) -> KeyedAddress:
        """Where other engines reach it."""
        return KeyedAddress(
            host=self.hosts[0], port=self.port, key=self.key, bootstrap_port=self.bootstrap_port
        )

    def node_arguments(self, node_rank: int) -> dict[str, str | int]:
        """Return SGLang's arguments for one of several nodes; none for an engine on one node."""
        if len(self.hosts) == 1:
            return {}
        return {
            "nnodes": len(self.hosts),
            "node_rank": node_rank,
            "dist_init_addr": host_and_port(self.hosts[0], self.dist_init_port),
            "nccl_port": self.nccl_ports[node_rank],
        }


def find_places(
    config: ExperimentConfig,
    plans: Sequence[ModelPlan],
    placements: Sequence[Mapping[str, Any]],
) -> dict[int, Place]:
    """Ask the devices of all servers for their GPUs and free ports.

    Args:
        placements: options of Ray for a process on each device of the servers.

    Returns:
        Places by the first device of the engine; empty if each engine is a process that has a
        device of its own and talks to nobody.
    """
    groups = [group for plan in plans for group in plan.groups]
    if not any(
        group.worker_type in HALVES or any(e.num_devices > 1 for e in group.engines)
        for group in groups
    ):
        return {}
    return place_engines(groups, look_at(placements, timeout_s=config.cluster.start_timeout_s))


def place_engines(groups: Sequence[GroupPlan], devices: Sequence[Device]) -> dict[int, Place]:
    """Give each engine its share of all devices, addresses and ports, in order; no port twice.

    Returns places by the first device of the engine.
    """
    free_ports = {device.host: list(device.free_ports) for device in devices}
    key = secrets.token_urlsafe()

    def take(host: str, count: int = 1) -> int:
        return _take_ports(free_ports[host], count, host=host)

    def place(group: GroupPlan, engine: EnginePlan) -> Place:
        hosts = tuple(devices[part.start].host for part in engine.nodes)
        return Place(
            gpus_of_nodes=tuple(tuple(devices[d].gpu for d in part) for part in engine.nodes),
            hosts=(LOOPBACK,) * len(hosts) if len(free_ports) == 1 else hosts,
            port=take(hosts[0]),
            nccl_ports=tuple(map(take, hosts)),
            dist_init_port=take(hosts[0], _NUM_DIST_INIT),
            bootstrap_port=take(hosts[0]) if group.worker_type == "prefill" else None,
            key=key,
        )

    return {
        engine.first_device: place(group, engine)
        for group in groups
        for engine in group.engines
        if not engine.url
    }


def _take_ports(free: list[int], count: int, *, host: str) -> int:
    """Take consecutive ports of a node, and all below them; return the lowest."""
    for begin, end in enumerate(range(count - 1, len(free))):
        lowest = free[begin]
        if free[end] - lowest == count - 1:
            del free[: end + 1]
            return lowest
    raise ResourceError(
        f"node {host} has no {count} free ports in a row among the {_NUM_PORTS} of "
        f"{_PORTS.start} to {_PORTS.stop} that were tried; end what listens there"
    )


def look_at(placements: Sequence[Mapping[str, Any]], *, timeout_s: float) -> tuple[Device, ...]:
    """Ask a process on each device, by these options of Ray, for its node, GPU and free ports."""
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
        """Return a future that fails if there is no node for the process; else it never ends."""
        answer: Future[None] = Future()
        watch = threading.Thread(target=self._watch, args=[answer], name="node", daemon=True)
        watch.start()
        return answer

    def _watch(self, answer: Future[None]) -> None:
        try:
            has_node = bool(self.reservation.wait(math.ceil(self.wait_s)))  # Ray drops the fraction
        except Exception as error:  # Ray has no class for a reservation that it dropped
            answer.set_exception(error)
            return
        if not has_node:
            answer.set_exception(
                ResourceError(
                    f"its node {self.host} is lost, and no other one has free resources for it: "
                    f"none joined within cluster.start_timeout_s={self.wait_s:g} s. Start Ray "
                    "there again, or on another one, and resume the run; or resume it with fewer "
                    "devices: serving.num_devices_per_node, cluster.num_nodes, and num_devices of "
                    "the groups"
                )
            )


def find_reserved_nodes(
    placements: Sequence[Mapping[str, Any]], *, wait_s: float
) -> dict[int, ReservedNode]:
    """Return the nodes of processes that Ray starts with these options, by their index.

    Those without a reservation have none. Ask while the nodes are there: afterwards nobody knows
    their addresses.
    """
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = {}
    for index, options in enumerate(placements):
        strategy = options.get("scheduling_strategy")
        if strategy is not None:
            of_bundles = placement_group_table(strategy.placement_group)["bundles_to_node_id"]
            host = hosts[of_bundles[strategy.placement_group_bundle_index]]
            nodes[index] = ReservedNode(strategy.placement_group, host, wait_s)
    return nodes
