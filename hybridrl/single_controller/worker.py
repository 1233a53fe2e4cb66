"""`Worker`, the base class for users; and the host, the actor that holds one or several workers."""

from __future__ import annotations

import inspect
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray

from hybridrl import env, log
from hybridrl.diagnostics import activity, trace
from hybridrl.errors import DispatchError
from hybridrl.network import LOOPBACK, bind, interface_of
from hybridrl.single_controller.dispatch import Registration, registered_methods
from hybridrl.single_controller.payload import install_reducers, run_after_call


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The position of one rank in a named mesh."""

    dp_rank: int
    dp_size: int
    is_output_rank: bool


class Worker:
    """Base of the classes that run on ranks. Subclass it and mark methods with ``@register``.

    The rendezvous is in the environment (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE) before the constructor runs, so ``init_process_group`` needs no argument.
    Payload arguments are read-only: they may be views of memory that other ranks read too.
    Without Ray, a worker reads its rank from the environment; without one it is the only rank.
    """

    rank: int
    """Global rank; ranks are ordered by node, then device."""
    world_size: int
    local_rank: int
    """Index of the device among those visible to the process (0 where Ray shows a single GPU);
    on a CPU the index among the ranks of the node. torch expects the same of LOCAL_RANK."""
    fused: Mapping[str, Worker]
    """The workers in this process by prefix, in order of construction, this one included."""
    meshes: dict[str, MeshPosition]

    def __new__(cls, *_: object, **__: object) -> Self:
        """Read the rank and its group; not in ``__init__``, which a subclass may not call."""
        worker = super().__new__(cls)
        worker.rank = int(env.get("RANK", "0"))
        worker.world_size = int(env.get("WORLD_SIZE", "1"))
        worker.local_rank = int(env.get("LOCAL_RANK", "0"))
        worker.fused = {}
        worker.meshes = {}
        return worker

    def register_mesh(
        self, name: str, *, dp_rank: int, dp_size: int, is_output_rank: bool = True
    ) -> None:
        """Report this rank's position in a mesh, for ``dispatch_by_mesh(name)``.

        Args:
            dp_rank: index of the slice this rank takes; tensor-parallel peers pass the same.
            dp_size: number of slices.
            is_output_rank: whether its result counts; exactly one rank of each dp rank has True.
        """
        position = MeshPosition(dp_rank, dp_size, is_output_rank)
        if self.meshes.setdefault(name, position) != position:
            raise DispatchError(
                f"mesh {name!r} is already {self.meshes[name]} on rank {self.rank}, "
                f"not {position}; register it once"
            )

    def close(self) -> None:
        """Release resources that outlive the process (servers, files). Runs at the group's end."""


@dataclass(frozen=True, slots=True)
class Location:
    """Node, GPU and record of an actor, as its own process reports them."""

    host: str
    node_id: str
    gpu_id: str | None
    """The GPU's number on the node, as Ray counts; None on a CPU."""
    device_index: int | None
    """Index of the GPU among those visible to the process."""
    files: activity.RecordFiles = activity.NO_RECORD


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker class and the arguments of its constructor."""

    cls: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class WorkerHost:
    """The Ray actor of one rank. It starts empty, so that ranks can be ordered before they begin.

    `build_host_class` adds one method for each registered method of each role.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self._port: socket.socket | None = None
        install_reducers()

    def host_locate(self) -> Location:
        """Return the process's node and the GPU that Ray gave it, and start its activity record."""
        context = ray.get_runtime_context()
        gpu_id = next(iter(context.get_accelerator_ids().get("GPU", [])), None)
        logs = activity.log_files()  # beside Ray's logs of this node
        folder = Path(logs[0]).parent if logs else Path(tempfile.gettempdir())
        return Location(
            host=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            gpu_id=gpu_id,
            device_index=None if gpu_id is None else _device_index(gpu_id),
            files=activity.start_recording(folder),
        )

    def host_reserve_port(self, address: str = LOOPBACK) -> int:
        """Bind a free port for the rendezvous, and reserve it for torch's store.

        A socket with SO_REUSEADDR that is bound but does not listen keeps the port from the
        kernel's choice for as long as it lives. A second socket with SO_REUSEADDR may still bind
        the port by name and listen, as torch's TCPStore does. So the port is never free, and the
        group can be initialised again after it was destroyed. This is how Linux reads SO_REUSEADDR;
        elsewhere the port is released now, and another process could take it.
        """
        self._port = bind(address)
        port = int(self._port.getsockname()[1])
        if sys.platform != "linux":
            self._port.close()
        return port

    def host_build(
        self,
        environment: dict[str, str],
        roles: dict[str, WorkerSpec],
        *,
        set_up: Callable[[], object] | None,
        traced_run: Path | None,
    ) -> None:
        """Construct the workers in order, in an environment that holds their rendezvous."""
        for name, value in environment.items():
            env.set_value(name, value)
        # Gloo listens at the rendezvous address, and not at the address of the host name.
        is_alone = environment["MASTER_ADDR"] == LOOPBACK
        if name := interface_of(LOOPBACK if is_alone else ray.util.get_node_ip_address()):
            env.set_default("GLOO_SOCKET_IFNAME", name)
        log.set_where(f"rank {environment['RANK']}")
        if traced_run is not None:
            names = "+".join(role.cls.__name__ for role in roles.values())
            name = f"rank {environment['RANK']} {names} on {ray.util.get_node_ip_address()}"
            num_processes = int(environment["WORLD_SIZE"])
            trace.process.write_to(traced_run, name, num_processes=num_processes)
        if set_up is not None:
            with activity.scope("set_up()"):
                set_up()
        for prefix, role in roles.items():
            worker = role.cls.__new__(role.cls, *role.args, **role.kwargs)
            worker.fused = self.workers
            self.workers[prefix] = worker
            class_name = role.cls.__name__
            with activity.scope(f"{class_name}.__init__()"), trace.span("build", role=class_name):
                role.cls.__init__(worker, *role.args, **role.kwargs)

    def host_mesh(self, prefix: str, mesh: str) -> MeshPosition | None:
        """Return the position that a worker registered in a mesh, or None."""
        return self.workers[prefix].meshes.get(mesh)

    def host_execute(self, prefix: str, name: str, *args: object, **kwargs: object) -> object:
        """Call any public method of a worker, registered or not."""
        with activity.scope(f"{join_prefix(prefix, name)}()"), trace.span(name):
            result = getattr(self.workers[prefix], name)(*args, **kwargs)
        run_after_call()
        return result

    def host_close(self) -> None:
        """Let the workers release resources that outlive the process, the last built first."""
        if self._port is not None:
            self._port.close()
        with activity.scope("close()"):
            for worker in reversed(self.workers.values()):
                worker.close()
        trace.process.end()


class AsyncWorkerHost(WorkerHost):
    """A host with workers that have ``async def`` methods: these run concurrently."""

    async def host_execute(self, prefix: str, name: str, *args: object, **kwargs: object) -> object:
        """Call any public method of a worker, registered or not."""
        with activity.scope(f"{join_prefix(prefix, name)}()"):
            result = getattr(self.workers[prefix], name)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        run_after_call()
        return result


def build_host_class(roles: Mapping[str, type[Worker]]) -> type[WorkerHost]:
    """Return a host with one method for each registered method of each role."""
    methods: dict[str, Callable[..., Any]] = {}
    for prefix, cls in roles.items():
        for name, registration in registered_methods(cls).items():
            full_name = join_prefix(prefix, name)
            if full_name in methods or full_name in dir(WorkerHost):
                raise DispatchError(
                    f"two remote methods are named {full_name!r}; rename the role {prefix!r} "
                    f"or {cls.__name__}.{name}"
                )
            methods[full_name] = _forward(cls, prefix, name, registration)
    is_async = any(inspect.iscoroutinefunction(method) for method in methods.values())
    class_name = "_".join(cls.__name__ for cls in roles.values())
    return type(class_name, (AsyncWorkerHost if is_async else WorkerHost,), methods)


def join_prefix(prefix: str, name: str) -> str:
    """Return the name of a worker's method on a fused host: ``actor_update``."""
    return f"{prefix}_{name}" if prefix else name


def _forward(
    cls: type[Worker], prefix: str, name: str, registration: Registration
) -> Callable[..., Any]:
    mesh = None if registration.dispatch.collect_from_all else registration.dispatch.mesh
    shown = f"{join_prefix(prefix, name)}()"

    def finish(worker: Worker, result: object) -> object:
        run_after_call()
        if mesh is not None and mesh in worker.meshes and not worker.meshes[mesh].is_output_rank:
            return None  # nobody reads it: it is not transferred
        return result

    # The methods are looked up on the instance's class: an override may lack @register.
    function: Callable[..., Any] = getattr(cls, name)

    def call(host: WorkerHost, *args: object, **kwargs: object) -> object:
        worker = host.workers[prefix]
        with activity.scope(shown), trace.span(join_prefix(prefix, name)):
            result = function(worker, *args, **kwargs)
            trace.note_host_memory()
            return finish(worker, result)

    async def call_async(host: WorkerHost, *args: object, **kwargs: object) -> object:
        worker = host.workers[prefix]
        coroutine: Awaitable[object] = function(worker, *args, **kwargs)
        with activity.scope(shown):
            return finish(worker, await coroutine)

    return call_async if inspect.iscoroutinefunction(function) else call


def _device_index(gpu_id: str) -> int:
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES").split(",") if name]
    if gpu_id in visible:
        return visible.index(gpu_id)
    return int(gpu_id) if not visible and gpu_id.isdigit() else 0


class RayClassWithInitArgs:
    """A worker class and the arguments of its constructor, which runs later, on the ranks.

    The class is a subclass of `Worker`, plain or wrapped in ``ray.remote`` as verl writes it. The
    arguments are pickled once for all ranks.
    """

    def __init__(self, cls: Any, *args: object, **kwargs: object) -> None:  # noqa: ANN401
        worker_cls = cls if isinstance(cls, type) else cls.__ray_actor_class__
        if not issubclass(worker_cls, Worker):
            raise DispatchError(
                f"{worker_cls.__name__} is not a worker; "
                "make it a subclass of hybridrl.single_controller.Worker"
            )
        self.roles: dict[str, WorkerSpec] = {"": WorkerSpec(worker_cls, args, kwargs)}
        """By prefix; a class that is not fused has the empty prefix."""


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Fuse several worker classes, so that each rank holds one instance of each in one process.

    The instances are built in the given order and find each other in ``self.fused``. On the group
    their methods carry the prefix (``group.actor_update``); ``group.spawn({"actor"})`` gives a
    group without it.
    """
    for prefix, part in class_dict.items():
        if not prefix.isidentifier() or list(part.roles) != [""]:
            raise DispatchError(
                f"cannot fuse {prefix!r}: a prefix is a Python name, and its class is not fused "
                "itself; pass for example {'actor': RayClassWithInitArgs(ActorWorker)}"
            )
    if not class_dict:
        raise DispatchError("nothing to fuse; pass {prefix: RayClassWithInitArgs(cls)}")
    fused = RayClassWithInitArgs.__new__(RayClassWithInitArgs)
    fused.roles = {prefix: part.roles[""] for prefix, part in class_dict.items()}
    return fused
