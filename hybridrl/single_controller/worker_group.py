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
    Padding,
    RankLayout,
    Registration,
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
    """Ray's method handles, by rank."""
    prefix: str
    name: str
    registration: Registration
    signature: inspect.Signature

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - the worker's type
        """Call the ranks; return the collected result, or a `Future` if not blocking.

        Raises:
            DispatchError: an argument cannot be bound, split or pickled. No rank was called.
            RemoteCallError: a rank failed.
            DeadlineError: a rank was late.
            WorkerGroupError: the group was stopped earlier.
        """
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
                for handle, row in zip(self.handles, zip(*columns, strict=True), strict=True)
            ]
        deadline = Deadline.after(self.actors.limits.timeout_s, "timeout_s")
        future = Future(self, refs, padding, deadline)
        return future.get() if self.registration.is_blocking else future

    @property
    def layout(self) -> RankLayout:
        """The slice of each rank."""
        return self.actors.layout(self.prefix, self.registration.dispatch.mesh)

    def _spread(self, values: Sequence[object]) -> tuple[list[list[Any]], Padding | None]:
        """Split each value over the ranks and store each distinct slice once, before any call."""
        dispatch, layout = self.registration.dispatch, self.layout
        padding = None
        if self.registration.pads:
            values, padding = pad_arguments(values, layout.dp_size)
        return [self._store(dispatch.split(layout, value)) for value in values], padding

    def _store(self, by_rank: Sequence[object]) -> list[Any]:
        stored: dict[int, Any] = {}
        for value in by_rank:
            if id(value) not in stored:
                stored[id(value)] = self._store_one(value)
        return [stored[id(value)] for value in by_rank]

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
    """A call in progress."""

    def __init__(
        self, method: RemoteMethod, refs: list[Any], padding: Padding | None, deadline: Deadline
    ) -> None:
        self._method = method
        self._refs = refs
        self._padding = padding
        self._deadline = deadline
        self._result: list[Any] = []

    def get(self) -> Any:  # noqa: ANN401 - the worker's type
        """Wait for all ranks and return the collected result; the same object each time.

        Raises:
            RemoteCallError: a rank failed.
            DeadlineError: a rank was late.
        """
        if not self._result:
            method = self._method
            results = method.actors.gather(self._refs, method=method.name, deadline=self._deadline)
            if self._padding is not None:
                results = self._padding.strip(method.layout, results)
            self._result.append(method.registration.dispatch.collect(method.layout, results))
        return self._result[0]


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

    def __getattr__(self, name: str) -> RemoteMethod:
        """Return a registered method."""
        methods: dict[str, RemoteMethod] = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"no registered worker method {name!r}; {suggest_name(name, sorted(methods))}"
            )
        return methods[name]


class RayWorkerGroup(WorkerGroup):
    """A worker group that starts its ranks on a pool, one process each, and stops them.

    Use it as a context manager, or call `shutdown`. An error that leaves the ``with``, or that a
    dead or late rank causes, holds a report on every rank: `diagnostics.process_report.reports_on`.

    Args:
        resource_pool: one bundle per rank.
        ray_cls_with_init: the worker class, or several fused ones.
        env_vars: environment of the processes, set before they import anything, for example
            ``hybridrl.env.process_environment(num_threads=1)``.
        timeout_s: seconds that a call may take. A late call breaks the group, because a rank in a
            collective cannot be cancelled.
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
    handles = [getattr(actor, join_prefix(prefix, name)) for actor in actors.actors]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return RemoteMethod(actors, handles, prefix, name, registration, inspect.Signature(parameters))
