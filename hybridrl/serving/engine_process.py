"""The processes of one engine: Ray actors that hold a managed engine, and the handle to them."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group_table

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import FaultKind
from hybridrl.errors import ResourceError, ServerDiedError
from hybridrl.log import configure_server
from hybridrl.network import LOOPBACK, Door
from hybridrl.processes.guard import descendants, process_stat
from hybridrl.sampler import Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.single_controller.payload import install_reducers
from hybridrl.workers.build import build_rollout_engine
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_listener import RequestProgram
from hybridrl.workers.rollout.sglang.arguments import (
    LaunchPlace,
    device_name,
    server_spec,
    show_devices,
)
from hybridrl.workers.rollout.sglang.server import follow
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.managed_engine import ManagedEngine

_CLOSE = (ManagedEngine.start, ManagedEngine.pause)

_END_S = 15.0
"""Seconds in which a process must have left a server that others run."""

_LOOK_S = 0.5
"""Seconds between looks whether a server is there."""

_SIGNALS: Mapping[FaultKind, int] = {"kill": SIGKILL, "stop": SIGSTOP}


class RolloutProcess:
    """The actor. Slow calls run in threads, so it answers requests and probes meanwhile."""

    def __init__(
        self,
        config: ExperimentConfig,
        model_folder: Path,
        place: LaunchPlace | None = None,
        key: str = "",
        process: str = "engine",
    ) -> None:
        """Build nothing yet; ``config`` is as ``engine_config`` returns it for the group.

        Without a ``place`` the engine has this process's device alone; without a ``key`` no other
        process asks its server. ``process`` is the name of this one in the run folder.
        """
        configure_server(Path(config.trainer.run_dir), process)
        self._key = key
        self._config = config
        self._model_folder = model_folder
        self._place = place
        self._engine: RolloutEngine | None = None
        self._managed: ManagedEngine
        self._requests: RequestProgram
        install_reducers()

    async def build(self) -> None:
        """Build the engine on the device of this process; a ResourceError without one."""
        await asyncio.to_thread(self._build)

    def _build(self) -> None:
        is_cuda = self._config.cluster.device == "cuda"
        if is_cuda and not torch.cuda.is_available():
            raise ResourceError(
                "cluster.device=cuda, but torch finds no CUDA device in the process of a rollout "
                "engine; set cluster.device=cpu, or install a CUDA build of torch"
            )
        device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
        place = self._place
        if self._key:
            is_alone = self._config.cluster.num_nodes == 1
            host = LOOPBACK if is_alone else ray.util.get_node_ip_address()
            place = place or LaunchPlace(gpus=(device_name(device),))
            place = replace(place, door=Door(host, self._key))
        self._engine = build_rollout_engine(self._config, self._model_folder, device, place=place)
        self._managed = ManagedEngine(self._engine, config=self._config.rollout, device=device)
        self._requests = RequestProgram(self._engine)

    async def address(self) -> str | None:
        """Return the address of the engine's server at present; None if nobody may ask it."""
        return self._engine.url if self._engine is not None and self._key else None

    async def act(self, action: Action) -> object:
        """Run an action; requests are admitted from ``continue`` to ``pause``."""
        if action in _CLOSE:
            self._requests.close()
        result = await asyncio.to_thread(action, self._managed)
        if action is ManagedEngine.continue_generation:
            await asyncio.to_thread(self._requests.open)
        return result

    async def answer(self, request: SampleRequest) -> list[Sample]:
        """Sample several continuations of one context; see ``Sampler``."""
        return await asyncio.wrap_future(self._requests.answer(request))

    async def probe(self) -> object:
        """Return how far the engine is: two answers differ unless it hangs."""
        await asyncio.wrap_future(self._requests.turn())
        return await asyncio.to_thread(self._managed.engine.progress)

    async def end(self) -> None:
        """End the own requests, and leave the server to others; for one that others run."""
        if self._engine is not None:  # else nothing was asked of the server
            self._requests.close()
            await asyncio.to_thread(self._engine.shutdown)

    async def signal(self, number: int) -> None:
        """Send a signal to the server below this process, but not to its guard; else to itself."""
        own = str(os.getpid())
        below = [pid for pid in descendants() if process_stat(pid)[1][1] != own]
        for pid in below or [os.getpid()]:
            os.kill(pid, number)

    async def live(self) -> None:
        """Return when the engine's server is gone; the call ends with this process, too."""
        while self._engine is None or not self._engine.has_died():
            await asyncio.sleep(_LOOK_S)


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
    """Return the nodes of reserved processes, by index; ask before any of them is lost."""
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = {}
    for index, options in enumerate(placements):
        strategy = options.get("scheduling_strategy")
        if strategy is not None:
            of_bundles = placement_group_table(strategy.placement_group)["bundles_to_node_id"]
            host = hosts[of_bundles[strategy.placement_group_bundle_index]]
            nodes[index] = ReservedNode(strategy.placement_group, host, wait_s)
    return nodes


class ProcessHandle(EngineHandle):
    """An engine in processes of Ray: one on each of its nodes. It is lost as soon as one is."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 - Ray's
        *followers: Any,  # noqa: ANN401 - Ray's
        nodes: Sequence[ReservedNode] = (),
        is_attached: bool = False,
    ) -> None:
        """Take over actors that start on these nodes. An attached engine's server outlives it."""
        self._actor = actor
        self._followers = followers
        self._nodes = nodes
        self._is_attached = is_attached
        self._lives = [answer_of(each.live.remote()) for each in (actor, *followers)]
        self._is_cut = False

    def build(self) -> Future[None]:
        """Build the engine. The wait ends early without a node for it, or with a follower."""
        built: Future[None] = self._call(self._actor.build)
        return first_ended(built, *(node.missing() for node in self._nodes), *self._lives[1:])

    def address(self) -> Future[str | None]:
        """Return the address of the engine's server."""
        return self._call(self._actor.address)

    def act(self, action: Action) -> Future[Any]:
        """Run an action on the managed engine."""
        return self._call(self._actor.act, action)

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        """Sample several continuations of one context."""
        return self._call(self._actor.answer, request)

    def probe(self) -> Future[object]:
        """Return how far the engine is."""
        return self._call(self._actor.probe)

    def is_alive(self) -> bool:
        """Whether processes and server are there: within a second after a death it is known."""
        return self._is_cut or not any(life.done() for life in self._lives)

    def harm(self, kind: FaultKind) -> None:
        """Send a signal to the processes, or lose all answers, and all calls but ``end``."""
        if kind == "cut":
            self._is_cut = True
        else:
            self._actor.signal.remote(_SIGNALS[kind])

    def end(self) -> None:
        """Kill all processes; a server that they started ends with them. Idempotent."""
        if self._is_attached:
            self._is_attached = False
            ray.wait([self._actor.end.remote()], timeout=_END_S)
        for actor in (self._actor, *self._followers):
            ray.kill(actor)

    def _call(self, method: Any, *args: object) -> Future[Any]:  # noqa: ANN401 - Ray's
        if self._is_cut:
            return Future()
        return answer_of(method.remote(*args), is_lost=lambda: self._is_cut)


def first_ended(*answers: Future[Any]) -> Future[None]:
    """Return a future that ends as the first of these does."""
    first: Future[None] = Future()
    first.set_running_or_notify_cancel()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        with suppress(InvalidStateError):  # another one was faster
            if error is None:
                first.set_result(None)
            else:
                first.set_exception(error)

    for answer in answers:
        answer.add_done_callback(settle)
    return first


def answer_of(
    ref: Any,  # noqa: ANN401 - Ray's
    *,
    is_lost: Callable[[], bool] = lambda: False,
) -> Future[Any]:
    """Return the result or error of a call; the future never ends if ``is_lost`` by then."""
    answer: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        if is_lost():
            return
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, RayTaskError):
            answer.set_exception(error.cause)
        elif isinstance(error, RayError):
            reason = f"the process of a rollout engine is gone: {error}"
            answer.set_exception(ServerDiedError(reason))
        else:
            answer.set_exception(error)

    answer.set_running_or_notify_cancel()
    ref.future().add_done_callback(settle)
    return answer


class FollowerProcess:
    """The actor on a further node of an engine: a parent for SGLang's processes there."""

    def __init__(self, config: ExperimentConfig, model_folder: Path, place: LaunchPlace) -> None:
        """Start nothing yet; ``config`` is as ``engine_config`` returns it for this node."""
        self._spec = server_spec(config, model_folder)
        self._variables = show_devices(place.gpus)

    async def live(self) -> None:
        """Start SGLang, and never return: the call ends with SGLang, or with the process."""
        await asyncio.to_thread(follow, self._spec, variables=self._variables)
