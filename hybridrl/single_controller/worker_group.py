"""Worker groups: the driver's handle on a set of ranks, their methods, and calls in flight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pickle import PicklingError
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import OutOfDiskError

from hybridrl.errors import DispatchError, ResourceError, suggest_name
from hybridrl.single_controller.actors import Deadline, GroupLimits, RankActors
from hybridrl.single_controller.dispatch import (
    Dispatch,
    Execute,
    Padding,
    RankLayout,
    Registration,
    ResultLayout,
    pad_arguments,
    registered_methods,
)
from hybridrl.single_controller.failures import STORE_IS_FULL
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.worker import RayClassWithInitArgs, Worker, join_prefix

_INLINE_TYPES = (bool, int, float, str, type(None), ray.ObjectRef)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A method of a worker, called on the ranks of its group: ``group.update(batch)``."""

    actors: RankActors
    handles: Sequence[Any]
    """Ray's method handles of the called ranks, starting with rank 0."""
    prefix: str
    name: str
    registration: Registration
    signature: inspect.Signature

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - the worker's type
        """Call the ranks; return the collected result, or a `Future` if not blocking.

        A DispatchError if an argument cannot be bound, split or pickled: then no rank was called.
        """
        future = self.start(*args, **kwargs)
        return future.get() if self.registration.is_blocking else future

    def start(self, *args: object, **kwargs: object) -> Future:
        """Call the ranks and do not wait."""
        self.actors.raise_if_unusable()
        if args or kwargs or self.signature.parameters:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise DispatchError(f"{self.name}{self.signature}: {error}") from error
        padding = None
        if not args and not kwargs:
            refs = [handle.remote() for handle in self.handles]
        else:
            columns, padding = self._spread([*args, *kwargs.values()])
            refs = [
                handle.remote(*row[: len(args)], **dict(zip(kwargs, row[len(args) :], strict=True)))
                for handle, row in zip(self.handles, zip(*columns, strict=True), strict=False)
            ]
        limit_s = self.registration.timeout_s or self.actors.limits.timeout_s
        return Future(self, refs, padding, Deadline.after(limit_s, "timeout_s"))

    @property
    def layout(self) -> RankLayout:
        """The slice of each rank."""
        return self.actors.layout(self.prefix, self.registration.dispatch.mesh)

    def _spread(self, values: Sequence[object]) -> tuple[list[list[Any]], Padding | None]:
        """Split each value over the ranks and store each distinct slice once, before any call."""
        dispatch, layout = self.registration.dispatch, self.layout
        handed_on: dict[int, list[Any]] = {}
        plain: list[object] = []
        for index, value in enumerate(values):
            refs = (
                value.forward_refs(dispatch.input_layout, layout)
                if isinstance(value, Future)
                else None
            )
            if refs is not None:
                handed_on[index] = refs
                plain.append(None)
            else:
                plain.append(value.get() if isinstance(value, Future) else value)
        padding = None
        if self.registration.pads:
            plain, padding = pad_arguments(plain, layout.dp_size)
            if padding is not None and handed_on:  # they must be padded too
                return self._spread([v.get() if isinstance(v, Future) else v for v in values])
        columns = [
            handed_on[index] if index in handed_on else self._store(dispatch.split(layout, value))
            for index, value in enumerate(plain)
        ]
        return columns, padding

    def _store(self, by_rank: Sequence[object]) -> list[Any]:
        stored: dict[int, Any] = {}
        for value in by_rank[: len(self.handles)]:
            if id(value) not in stored:
                stored[id(value)] = self._store_one(value)
        return [stored[id(value)] for value in by_rank[: len(self.handles)]]

    def _store_one(self, value: object) -> object:
        if isinstance(value, _INLINE_TYPES):
            return value
        try:
            return ray.put(value)
        except (TypeError, PicklingError) as error:
            raise DispatchError(
                f"an argument of {self.name}() of type {type(value).__name__} cannot be pickled: "
                f"{error.__cause__ or error}; pass plain data and build the object in the worker"
            ) from error
        except OutOfDiskError as error:
            raise ResourceError(
                f"an argument of {self.name}() cannot be sent: {STORE_IS_FULL}"
            ) from error


class Future:
    """A call in progress. Pass it to the next call as it is, or `get` its result."""

    def __init__(
        self, method: RemoteMethod, refs: list[Any], padding: Padding | None, deadline: Deadline
    ) -> None:
        self._method = method
        self._refs = refs
        self._padding = padding
        self._deadline = deadline
        self._result: list[Any] = []

    def get(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - the worker's type
        """Wait for all ranks and return the collected result; the same object each time.

        ``timeout_s`` limits this wait; the call itself runs until its own deadline.
        """
        if not self._result:
            method = self._method
            results = method.actors.gather(
                self._refs, method=method.name, deadline=self._deadline, wait_s=timeout_s
            )
            self._result.append(self._collect(results))
        return self._result[0]

    def is_done(self) -> bool:
        """Return whether every rank has returned or failed."""
        _, pending = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        return not pending

    def forward_refs(self, input_layout: ResultLayout, layout: RankLayout) -> list[Any] | None:
        """Return one reference per rank for a call with this input layout, without waiting.

        None if the layouts differ, so that the driver must collect and split.
        """
        registration = self._method.registration
        if registration.execute is Execute.RANK_ZERO:
            return self._refs * layout.world_size if input_layout is ResultLayout.WHOLE else None
        if registration.dispatch.output_layout is not input_layout or self._padding is not None:
            return None
        if input_layout is ResultLayout.PER_RANK and len(self._refs) == layout.world_size:
            return self._refs
        if (
            input_layout is ResultLayout.PER_DP_RANK
            and self._method.layout.dp_size == layout.dp_size
        ):
            slices = [self._refs[rank] for rank in self._method.layout.collecting_ranks]
            return [slices[dp_rank] for dp_rank in layout.dp_rank_of]
        return None

    def _collect(self, results: list[Any]) -> object:
        registration = self._method.registration
        if registration.execute is Execute.RANK_ZERO:
            return results[0]
        layout = self._method.layout
        if self._padding is not None:
            results = self._padding.strip(layout, results)
        return registration.dispatch.collect(layout, results)


class WorkerGroup:
    """Ranks that are called together. Registered methods of the worker classes are its methods."""

    def __init__(
        self, actors: RankActors, roles: Mapping[str, type[Worker]], *, spawned: str = ""
    ) -> None:
        self._actors = actors
        self._roles = dict(roles)
        self._methods: dict[str, RemoteMethod] = {}
        for prefix, cls in roles.items():
            for name, registration in registered_methods(cls).items():
                public_name = name if prefix == spawned else join_prefix(prefix, name)
                self._methods[public_name] = _bind(actors, prefix, cls, name, registration)
        taken = sorted(set(self._methods) & set(dir(type(self))))
        if taken:
            raise DispatchError(f"worker methods {taken} would hide the group's own; rename them")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._actors.actors)

    @property
    def hosts(self) -> list[str]:
        """IP address of the node of each rank."""
        return list(self._actors.hosts)

    def describe_places(self) -> str:
        """List the ranks of each node: ``ranks 0, 1 on 10.0.0.1 (node 3fa2b1c9); ...``."""
        return self._actors.describe_places()

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return a group for each prefix of a fused class, on the same processes."""
        unknown = [prefix for prefix in prefix_set if prefix not in self._roles or not prefix]
        if unknown:
            raise DispatchError(
                f"no fused worker {unknown[0]!r}; {suggest_name(unknown[0], sorted(self._roles))}"
            )
        return {
            prefix: WorkerGroup(self._actors, {prefix: self._roles[prefix]}, spawned=prefix)
            for prefix in prefix_set
        }

    def execute_all(self, method_name: str, *args: object, **kwargs: object) -> Future:
        """Call any public method, registered or not, on all ranks; the future gives a list."""
        return self._execute(Execute.ALL, method_name, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """Call any public method on all ranks and return the results by rank."""
        return list(self.execute_all(method_name, *args, **kwargs).get())

    def execute_rank_zero(self, method_name: str, *args: object, **kwargs: object) -> Future:
        """Call any public method, registered or not, on rank 0; the future gives its result."""
        return self._execute(Execute.RANK_ZERO, method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Call any public method on rank 0 and return its result."""
        return self.execute_rank_zero(method_name, *args, **kwargs).get()

    def __getattr__(self, name: str) -> RemoteMethod:
        """Return a registered method."""
        methods: dict[str, RemoteMethod] = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"no registered worker method {name!r}; {suggest_name(name, sorted(methods))}"
            )
        return methods[name]

    def _execute(
        self, execute: Execute, name: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future:
        if len(self._roles) > 1:
            raise DispatchError(
                f"{name!r} could be meant for any of {sorted(self._roles)}; "
                f"call it on the group that spawn() returns"
            )
        [(prefix, cls)] = self._roles.items()
        known = [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"]
        if name not in known:
            raise AttributeError(
                f"{cls.__name__} has no method {name!r}; {suggest_name(name, known)}"
            )
        registration = Registration(dispatch=Dispatch.ONE_TO_ALL, execute=execute)
        handles = [actor.host_execute for actor in self._actors.actors]
        method = RemoteMethod(
            self._actors,
            handles[:1] if execute is Execute.RANK_ZERO else handles,
            prefix,
            name,
            registration,
            inspect.signature(_any_arguments),
        )
        return method.start(prefix, name, *args, **kwargs)


class RayWorkerGroup(WorkerGroup):
    """A worker group that starts its ranks on a pool, one process each, and stops them.

    Use it as a context manager, or call `shutdown`. An error that leaves the ``with``, or that a
    dead or late rank causes, holds a report on every rank: `diagnostics.process_report.reports_on`.

    Args:
        resource_pool: one bundle per rank.
        ray_cls_with_init: the worker class, or several fused ones.
        env_vars: environment of the processes, set before they import anything, for example
            ``hybridrl.env.process_environment(num_threads=1)``.
        timeout_s: seconds that a call may take, unless ``@register(timeout_s=)`` says otherwise.
        grace_s: seconds that the other ranks may take to return after a failure.
        start_timeout_s: seconds for starting the processes, and again for the constructors.
        set_up: called without arguments in each process, once, before workers are constructed and
            after the environment is set. It is pickled, so it must be importable on the ranks.

    Raises:
        ResourceError: the cluster lacks the resources of the pool.
        RemoteCallError: a constructor raised, or ``set_up``.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        env_vars: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
        grace_s: float = 5.0,
        start_timeout_s: float = 300.0,
        set_up: Callable[[], object] | None = None,
    ) -> None:
        roles = ray_cls_with_init.roles
        limits = GroupLimits(
            timeout_s=timeout_s,
            grace_s=grace_s,
            start_timeout_s=start_timeout_s,
            env_vars=env_vars or {},
            set_up=set_up,
        )
        actors = RankActors(resource_pool, roles, limits)
        try:
            super().__init__(actors, {prefix: role.cls for prefix, role in roles.items()})
        except BaseException:
            actors.stop("its methods cannot be bound")
            raise

    def shutdown(self) -> None:
        """Close the workers, end their processes, give the resources back. Twice is a no-op."""
        self._actors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._actors.report_on(error)
        finally:
            self.shutdown()


def _bind(
    actors: RankActors, prefix: str, cls: type[Worker], name: str, registration: Registration
) -> RemoteMethod:
    function: Callable[..., Any] = getattr(cls, name)
    called = actors.actors[:1] if registration.execute is Execute.RANK_ZERO else actors.actors
    handles = [getattr(actor, join_prefix(prefix, name)) for actor in called]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return RemoteMethod(actors, handles, prefix, name, registration, inspect.Signature(parameters))


def _any_arguments(*args: object, **kwargs: object) -> None: ...
