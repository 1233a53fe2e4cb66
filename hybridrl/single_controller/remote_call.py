"""A registered method seen from the driver, and the future of a call in flight."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import OutOfDiskError

from hybridrl.errors import DispatchError, ResourceError
from hybridrl.single_controller.actors import Deadline, RankActors
from hybridrl.single_controller.dispatch import (
    Execute,
    Padding,
    RankLayout,
    Registration,
    ResultLayout,
    pad_arguments,
)
from hybridrl.single_controller.failures import STORE_IS_FULL

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

        Raises:
            DispatchError: an argument cannot be bound, split or pickled. No rank was called.
            RemoteCallError: a rank failed.
            DeadlineError: a rank was late.
            WorkerGroupError: the group was stopped earlier.
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

        Raises:
            RemoteCallError: a rank failed.
            DeadlineError: a rank was late.
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
