"""One rollout engine as the manager calls it: of a process here, of a rank, or of others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from hybridrl.config.serving import FaultKind
from hybridrl.errors import DriftError, PhaseError, RequestError
from hybridrl.sampler import Sample, SampleRequest, T
from hybridrl.serving.plan import PlannedDevices
from hybridrl.workers.rollout.request_listener import (
    DRIFTED,
    SAMPLE_ROUTE,
    read_answer,
    request_body,
)
from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.sharding.lifecycle import Action


class EngineHandle(ABC):
    """An engine that answers requests. Calls return at once.

    A future holds the error of the engine, or of its lost process. The defaults are those of an
    engine that others build and move along its life.
    """

    @abstractmethod
    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        """Sample several continuations of one context; see ``Sampler``."""

    @abstractmethod
    def probe(self) -> Future[object]:
        """Return how far the engine is: two answers differ unless it hangs."""

    @abstractmethod
    def end(self) -> None:
        """End the engine and its process, or the connections to those of others. Idempotent."""

    def build(self) -> Future[None]:
        """Build the engine; called once."""
        return answered(None)

    def address(self) -> Future[str | None]:
        """Return the address of the engine's server; None if requests are calls of this handle."""
        return answered(None)

    def act(self, action: Action) -> Future[Any]:
        """Run an edge of the life cycle, or another action, on the managed engine."""
        return answered(None)

    def is_alive(self) -> bool:
        """Whether the process is there, as far as it is known."""
        return True

    def harm(self, kind: FaultKind) -> None:
        """Make a fault on purpose; see ``requests.py``. The configuration allows none elsewhere."""
        raise PhaseError(f"a fault on purpose of kind {kind} was meant for an engine of others")


class RankHandle(EngineHandle):
    """An engine over HTTP. Its rank moves it along the life cycle, and nobody else."""

    def __init__(self, url: str, *, key: str) -> None:
        self._client = ControlClient(url, name=f"the engine of a rank at {url}", key=key)
        self.is_lost = False
        """Whether it failed: its rank restarts it after the phase."""

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        """Sample several continuations of one context."""
        return self._client.start(self._sample(request))

    async def _sample(self, request: SampleRequest) -> list[Sample]:
        if request.images:  # in a thread: the pixels may come from another machine
            body = await asyncio.to_thread(request_body, request)
        else:
            body = request_body(request)
        try:
            answer = await self._client.request(SAMPLE_ROUTE, body, timeout_s=None)
        except RefusedError as error:
            if error.status == DRIFTED:
                raise DriftError(error.text) from error
            if not error.is_servers_fault:
                raise RequestError(error.text) from error
            raise
        return read_answer(answer)

    def probe(self) -> Future[object]:
        """Return how far the engine is."""
        return self._client.start(self._client.loads())

    def is_alive(self) -> bool:
        """Whether it was not lost: no process of another machine can be looked at."""
        return not self.is_lost

    def end(self) -> None:
        """Close all connections."""
        self._client.close()


def answered(value: T) -> Future[T]:
    """Return a future that has its result: of a call that asks nobody."""
    answer: Future[T] = Future()
    answer.set_result(value)
    return answer


Launch = Callable[[PlannedDevices], EngineHandle]
"""Starts the process of an engine, without waiting."""

AskGroup = Callable[[EngineHandle, SampleRequest], Coroutine[Any, Any, list[Sample]]]
"""Sends a request to one engine."""


async def ask_process(engine: EngineHandle, request: SampleRequest) -> list[Sample]:
    """Send a request to the process of an engine."""
    return await asyncio.wrap_future(engine.answer(request))
