"""One rollout engine, as the manager's requests and its group call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from hybridrl.metrics import Metrics
from hybridrl.sampler import RequestParams, Sample, T
from hybridrl.serving.plan import EnginePlan, GroupPlan
from hybridrl.workers.sharding.lifecycle import Action


class SamplingEngine(Protocol):
    """An engine that answers requests; a rank or the manager moves it along its life.

    Calls return at once. A future holds the error of the engine, or of its lost process.
    """

    def address(self) -> Future[str | None]:
        """Return the address of the engine's server; None if requests are calls of this handle."""
        ...

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Sample several continuations of one context; see ``Sampler``."""
        ...

    def probe(self) -> Future[object]:
        """Return how far the engine is: two answers differ unless it hangs."""
        ...

    def is_alive(self) -> bool:
        """Whether the process is there, as far as it is known."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the engine's processes, as a fault on purpose; see ``faults.py``."""
        ...

    def cut(self) -> None:
        """Lose all that travels to and from the engine, but ``end``; a fault on purpose, too."""
        ...


class EngineHandle(SamplingEngine, Protocol):
    """An engine in a process of its own, which the manager moves along its life."""

    def build(self) -> Future[None]:
        """Build the engine; called once."""
        ...

    def act(self, action: Action) -> Future[Any]:
        """Run one edge of the life cycle on the managed engine; what it returns."""
        ...

    def interrupt(self) -> Future[None]:
        """End open responses at their present token; see ``RolloutEngine.interrupt``."""
        ...

    def take_metrics(self) -> Future[Metrics]:
        """Return the engine's metrics since the last time, and reset them."""
        ...

    def end(self) -> None:
        """End the engine and its process. Idempotent."""
        ...


def answered(value: T) -> Future[T]:
    """Return a future that has its result: of a call that asks nobody."""
    answer: Future[T] = Future()
    answer.set_result(value)
    return answer


Launch = Callable[[GroupPlan, EnginePlan], EngineHandle]
"""Starts the process of an engine, without waiting."""
