"""Starts the rollout manager and the processes of engines on reserved devices, and ends them."""

from __future__ import annotations

import random
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import ASKED_BY_OTHERS, WorkerType
from hybridrl.errors import ResourceError
from hybridrl.network import LOOPBACK, host_and_port
from hybridrl.serving.engine_process import (
    FollowerProcess,
    ProcessHandle,
    ReservedNode,
    RolloutProcess,
    find_reserved_nodes,
)
from hybridrl.serving.frozen import ApiKeys
from hybridrl.serving.manager import RolloutManager
from hybridrl.serving.plan import ModelPlan, PlannedDevices, plan_own_engines
from hybridrl.single_controller import RayResourcePool
from hybridrl.workers.engine_settings import (
    attached_config,
    driver_variables,
    engine_config,
    frozen_config,
    group_arguments,
)
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, KeyedAddress, LaunchPlace
from hybridrl.workers.rollout.sglang.process import is_port_free
from hybridrl.workers.sharding.manager_client import ManagerClient

_PORTS = range(20_000, 31_000)
_NUM_TRIED = 200
"""Ports of its node that a process on each device tries; others of the node try others."""

_NUM_DIST_INIT = 31
"""Consecutive ports that SGLang counts up from the port of ``dist_init_addr``: 30, and one for each
data-parallel rank of an engine, of which there is one."""

_NUM_PORTS = 4 + _NUM_DIST_INIT
"""Of an engine on its first node: of HTTP, of NCCL, of a prefill engine's entries and of encoders,
too."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the servers."""

    host: str
    """Address of its node in the cluster."""

    gpu: str
    """Name that other processes of its node use; empty on a CPU."""

    first_port: int | None
    """First of ``_NUM_PORTS`` consecutive ports of its node without a listener, for this device
    alone; None: among those that it tried are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Devices, addresses and ports of one engine. An engine that replaces it gets the same."""

    gpus_of_nodes: tuple[tuple[str, ...], ...]
    """GPUs on each of its nodes, by ``Device.gpu``."""

    address: KeyedAddress
    """Where other engines reach it, on the first node."""

    nccl_ports: tuple[int, ...]
    """One on each node."""

    encoders_port: int
    """Where it would list its encoders, on the first node."""

    dist_init_port: int
    """First of the consecutive ports of the rendezvous, on the first node."""

    def node_arguments(self, node_rank: int) -> dict[str, str | int]:
        """Return SGLang's arguments for one of several nodes; none for an engine on one node."""
        if len(self.nccl_ports) == 1:
            return {}
        return {
            "nnodes": len(self.nccl_ports),
            "node_rank": node_rank,
            "dist_init_addr": host_and_port(self.address.host, self.dist_init_port),
            "nccl_port": self.nccl_ports[node_rank],
        }


def find_places(
    config: ExperimentConfig, plans: Sequence[ModelPlan], placements: Sequence[Mapping[str, Any]]
) -> dict[int, Place]:
    """Ask all devices for GPUs and free ports; return places by an engine's first device."""
    engines = [engine for plan in plans for engine in plan.engines]
    if not any(e.worker_type in ASKED_BY_OTHERS or e.num_devices > 1 for e in engines):
        return {}
    return place_engines(engines, look_at(placements, timeout_s=config.cluster.start_timeout_s))


def place_engines(engines: Sequence[PlannedDevices], devices: Sequence[Device]) -> dict[int, Place]:
    """Give each engine the GPUs, addresses and ports of its devices, by its first device."""
    is_alone = len({device.host for device in devices}) == 1
    key = secrets.token_urlsafe()

    def place(engine: PlannedDevices) -> Place:
        ports = [_first_port(devices[part.start]) for part in engine.nodes]
        host = LOOPBACK if is_alone else devices[engine.first_device].host
        entries_port = ports[0] + 1 if engine.worker_type == "prefill" else None
        return Place(
            gpus_of_nodes=tuple(tuple(devices[d].gpu for d in part) for part in engine.nodes),
            address=KeyedAddress(host=host, port=ports[0], key=key, bootstrap_port=entries_port),
            nccl_ports=tuple(port + 2 for port in ports),
            encoders_port=ports[0] + 3,
            dist_init_port=ports[0] + 4,
        )

    return {engine.first_device: place(engine) for engine in engines if not engine.url}


def _first_port(device: Device) -> int:
    if device.first_port is None:
        raise ResourceError(
            f"node {device.host} has no {_NUM_PORTS} free ports in a row among {_NUM_TRIED} of "
            f"{_PORTS.start} to {_PORTS.stop} that were tried; end what listens there"
        )
    return device.first_port


def look_at(placements: Sequence[Mapping[str, Any]], *, timeout_s: float) -> tuple[Device, ...]:
    """Ask a process on each device, by these options of Ray, for its node, GPU and free ports."""
    task = ray.remote(_look)
    first = random.randrange(len(_PORTS))
    answers = [
        task.options(**options).remote((first + number * _NUM_TRIED) % (len(_PORTS) - _NUM_TRIED))
        for number, options in enumerate(placements)
    ]
    try:
        return tuple(ray.get(answers, timeout=timeout_s))
    except GetTimeoutError as error:
        raise ResourceError(
            f"no process started on the {len(placements)} devices of the servers within "
            f"cluster.start_timeout_s={timeout_s:g} s"
        ) from error


def _look(first: int) -> Device:
    gpus = ray.get_gpu_ids()  # by the names of CUDA_VISIBLE_DEVICES
    return Device(
        host=ray.util.get_node_ip_address(),
        gpu=str(gpus[0]) if gpus else "",
        first_port=free_row([port for port in _PORTS[first:][:_NUM_TRIED] if is_port_free(port)]),
    )


def free_row(free_ports: Sequence[int]) -> int | None:
    """Return the first of ``_NUM_PORTS`` consecutive ones among these ports, which rise."""
    for lowest, highest in zip(free_ports, free_ports[_NUM_PORTS - 1 :], strict=False):
        if highest - lowest == _NUM_PORTS - 1:
            return lowest
    return None


_OTHER_CALLS = 100
"""Calls to an engine beside its requests: stages, probes, and requests that were given up. Ray runs
1,000 at a time by default, and an engine whose probe waits behind them would count as hung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLaunch:
    """A ``Launch`` for the engines of one model, on devices that the driver reserved."""

    config: ExperimentConfig

    plan: ModelPlan

    policy_folder: Path
    """Whose configuration and tokenizer the engines of the policy read."""

    placements: Sequence[Mapping[str, Any]]
    """Options of Ray for a process on each device of the servers."""

    anywhere: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    """Options of Ray for a process without a device."""

    places: Mapping[int, Place] = field(default_factory=dict)
    """Of ``find_places``."""

    nodes: Mapping[int, ReservedNode] = field(default_factory=dict)
    """Of ``find_reserved_nodes``."""

    keys: ApiKeys = field(default_factory=ApiKeys)

    def __call__(self, engine: PlannedDevices) -> ProcessHandle:
        """Start the processes of an engine, one on each of its nodes, without waiting."""
        if engine.url:
            return ProcessHandle(self._attach(engine), is_attached=True)
        actors = [self._start(engine, rank) for rank in range(len(engine.nodes))]
        nodes = [self.nodes.get(part.start) for part in engine.nodes]
        return ProcessHandle(*actors, nodes=tuple(filter(None, nodes)))

    def _attach(self, engine: PlannedDevices) -> Any:  # noqa: ANN401 - Ray's
        config, model = attached_config(self.config), self.plan.model
        elsewhere = Elsewhere(
            url=engine.url,
            key=self.keys.by_model[model],
            section=f"serving.models.{model}",
            weights=config.serving.weights,
        )
        place = LaunchPlace(gpus=("",), elsewhere=elsewhere)
        actor = self._actor(self.anywhere, config)
        return actor.remote(config, self.policy_folder, place, process=self._process(engine))

    def _start(self, engine: PlannedDevices, rank: int) -> Any:  # noqa: ANN401 - Ray's
        serving, model = self.config.serving, self.plan.model
        served, is_policy = serving.models[model], model == serving.policy
        place = self.places.get(engine.first_device)
        encoders = [address.url for address in self._addresses("encoder")]
        args = group_arguments(
            served.groups[engine.group],
            bootstrap_port=None if place is None else place.address.bootstrap_port,
            encoders=encoders,
        )
        if encoders and place is not None:
            args["encoder_bootstrap_port"] = place.encoders_port
        config = engine_config(
            self.config if is_policy else frozen_config(self.config, model),
            args if place is None else args | place.node_arguments(rank),
            num_devices=engine.num_devices,
            number=engine.first_device,
        )
        folder = self.policy_folder if is_policy else Path(str(served.path))
        placement = self.placements[engine.nodes[rank].start]
        of_launch = None if place is None else self._place(engine, place, rank)
        if rank:
            follower = ray.remote(FollowerProcess).options(**placement)
            return follower.remote(config, folder, of_launch)
        # Callers on other nodes: the manager, the rank that sends.
        is_reached = self.config.asks_servers or serving.weights == "broadcast"
        key = self.keys.own if is_policy and is_reached else ""
        actor = self._actor(placement, config)
        return actor.remote(config, folder, of_launch, key, self._process(engine))

    def _actor(self, placement: Mapping[str, Any], config: ExperimentConfig) -> Any:  # noqa: ANN401 - Ray's
        num_calls = config.rollout.num_slots + _OTHER_CALLS
        return ray.remote(RolloutProcess).options(**placement, max_concurrency=num_calls)

    def _process(self, engine: PlannedDevices) -> str:
        return f"{self.plan.model}-engine-{self.plan.engines.index(engine)}"

    def _place(self, engine: PlannedDevices, place: Place, rank: int) -> LaunchPlace:
        return LaunchPlace(
            gpus=place.gpus_of_nodes[rank],
            address=None if rank or engine.worker_type == "regular" else place.address,
            prefills=self._addresses("prefill") if engine.worker_type == "decode" else (),
        )

    def _addresses(self, worker_type: WorkerType) -> tuple[KeyedAddress, ...]:
        """Return where all engines of this type are reached."""
        return tuple(
            self.places[engine.first_device].address
            for engine in self.plan.engines
            if engine.worker_type == worker_type
        )


@contextmanager
def start_servers(
    config: ExperimentConfig, model_folder: Path, *, variables: Mapping[str, str]
) -> Iterator[ManagerClient]:
    """Start the servers of a run, and end them. All paths are absolute.

    ``variables`` are the environment of the processes, besides that of the driver which concerns
    engines. A ResourceError if the cluster lacks devices, a StageError if an engine did not start.
    """
    cluster, rollout = config.cluster, config.rollout
    variables = {**driver_variables(config, env.everything()), **variables}
    environment = {"runtime_env": {"env_vars": variables} if variables else {}}
    folder = Path(mkdtemp(prefix="hybridrl-served-weights-"))
    key = secrets.token_urlsafe()
    try:
        with _own_devices(config) as reserved:
            placements = [{**options, **environment} for options in reserved]
            anywhere = {"num_cpus": 0, **environment}
            manager = _start_manager(config, model_folder, placements, anywhere, key)
            limit_s = cluster.start_timeout_s + 2 * rollout.start_timeout_s  # encoders, then others
            num_frozen = len(config.serving.frozen)
            limit_s += num_frozen * (2 * rollout.start_timeout_s + rollout.stage_timeout_s)
            client = ManagerClient(
                manager,
                timeout_s=cluster.call_timeout_s,
                # No server of an embedded engine could join a group.
                weights=config.serving.weights if rollout.engine == "sglang" else "files",
                weight_deltas=config.serving.weight_deltas,
                folder=folder,
                stage_timeout_s=rollout.stage_timeout_s,
                key=key,
            )
            try:
                client.start(timeout_s=limit_s)
                yield client
            finally:
                client.shutdown(timeout_s=limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # which dead ranks leave behind


@contextmanager
def _own_devices(config: ExperimentConfig) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Reserve the servers' own devices; yield Ray's options for a process on each device in order.

    Those of a device of the trainer, where no process starts, are of another one of its node.
    """
    cluster, num_shared = config.cluster, config.num_shared_per_node
    num_own = config.num_own_server_devices // cluster.num_nodes
    if not num_own:
        yield ()
        return
    pool = RayResourcePool(
        process_on_nodes=[num_own] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        wait_s=cluster.start_timeout_s,
        is_spread=True,
    )
    own = pool.lease()
    try:
        yield [
            own[first + max(0, number - num_shared)]
            for first in range(0, len(own), num_own)
            for number in range(config.serving.num_devices_per_node)
        ]
    finally:
        pool.give_back()


def _start_manager(
    config: ExperimentConfig,
    model_folder: Path,
    placements: Sequence[Mapping[str, Any]],
    anywhere: Mapping[str, Any],
    key: str,
) -> Any:  # noqa: ANN401 - Ray's
    plans = plan_own_engines(config)
    keys = ApiKeys.read(config, own=key)
    launch_of = partial(
        ActorLaunch,
        config=config,
        policy_folder=model_folder,
        placements=placements,
        anywhere=anywhere,
        places=find_places(config, plans, placements),
        nodes=find_reserved_nodes(placements, wait_s=config.cluster.start_timeout_s),
        keys=keys,
    )
    launches = {plan.model: launch_of(plan=plan) for plan in plans}
    # The end of a run must not wait behind a batch.
    num_calls = 2 if config.samples_ahead else 1
    actor = ray.remote(RolloutManager).options(**anywhere, max_concurrency=num_calls)
    return actor.remote(config, model_folder, launches, keys)
