"""Health of engines and routers: a dead or hung one is reported, a busy or paused one never.

Liveness is progress, never a generation: an engine says how far it is, and must be further within
``serving.health_timeout_s``. Nobody is watched unless a program samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hybridrl.diagnostics import trace
from hybridrl.metrics import Max, Metrics, Sum, merge

_LONGEST_POLL_S = 1.0
_PROBE_S = 10.0
"""Seconds that a pause waits for probes in flight; a hung engine answers none."""


@dataclass(slots=True)
class _Watch:
    """Progress of one engine since a program samples."""

    changed_s: float
    """When it was further than before, at the latest."""
    progress: object = None
    probe: Future[object] | None = None


class Watched(Protocol):
    """A process that may die or hang: an engine, or a router."""

    def is_alive(self) -> bool:
        """Whether the process is there."""
        ...

    def probe(self) -> Future[object]:
        """Return how far it is: two answers differ unless it hangs."""
        ...


W = TypeVar("W", bound=Watched)


class HealthMonitor(Generic[W]):
    """Looks at the engines of one server from time to time, while a program samples."""

    def __init__(
        self,
        engines: Callable[[], Mapping[int, W]],
        report: Callable[[int, W, str], object],
        *,
        timeout_s: float,
    ) -> None:
        """Watch nothing yet; ``report`` hears of dead engines, and of those without progress."""
        self._engines = engines
        self._report = report
        self._timeout_s = timeout_s
        self._watches: dict[W, _Watch] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block; after it no engine is asked, and none was asked in vain."""
        has_ended = threading.Event()
        thread = threading.Thread(target=self._run, args=[has_ended], name="health", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self.stop()

    def look(self, now_s: float) -> None:
        """Look at all engines once, at ``now_s`` by a monotonic clock."""
        for index, engine in self._engines().items():
            watch = self._watches.setdefault(engine, _Watch(changed_s=now_s))
            if reason := self._judge(engine, watch, now_s):
                self._report(index, engine, reason)

    def stop(self) -> None:
        """Wait for the probes in flight, whose answers count no more; all waits begin again."""
        probes = [watch.probe for watch in self._watches.values() if watch.probe is not None]
        self._watches.clear()
        wait(probes, timeout=min(_PROBE_S, self._timeout_s))

    def _judge(self, engine: W, watch: _Watch, now_s: float) -> str:
        """Return why an engine is lost; empty if it is not."""
        if not engine.is_alive():
            return "its process is gone"
        if watch.probe is not None and watch.probe.done():
            if watch.probe.exception() is None and watch.probe.result() != watch.progress:
                watch.progress, watch.changed_s = watch.probe.result(), now_s
            watch.probe = None
        if now_s - watch.changed_s > self._timeout_s:
            return f"no progress within serving.health_timeout_s={self._timeout_s:g} s"
        if watch.probe is None:
            watch.probe = engine.probe()
        return ""

    def _run(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(min(_LONGEST_POLL_S, self._timeout_s / 4)):
            self.look(time.monotonic())


log = logging.getLogger(__name__)

LOST, REPLACED = "an engine was lost:", "an engine was replaced:"
"""Beginnings of the lines of the log that the report shows."""

_NONE: Metrics = {"rollout/lost_engines": Sum(0), "rollout/replaced_engines": Sum(0)}


class Losses:
    """Lost engines of one server, by index. Each event is in the log and in the trace."""

    def __init__(self, model: str) -> None:
        """Begin with none of the engines of ``model``."""
        self._model = model
        self._lost: dict[int, tuple[int, str]] = {}
        """When by ``time.perf_counter_ns``, and why; by index, until it is replaced."""
        self._metrics: Metrics = {}

    def note_lost(self, members: Collection[int], reason: str) -> None:
        """Count engines, unless they are counted and not replaced yet."""
        new = [index for index in members if index not in self._lost]
        for index in new:
            self._lost[index] = time.perf_counter_ns(), reason
            log.warning("%s model=%s engine=%d reason=%s", LOST, self._model, index, reason)
        lost: Metrics = {"rollout/lost_engines": Sum(len(new))}
        self._metrics = merge([self._metrics, lost])

    def note_ready(self, members: Collection[int]) -> None:
        """Count the lost ones among engines that serve: they were replaced."""
        for index in self._lost.keys() & set(members):
            begin_ns, reason = self._lost.pop(index)
            took_s = (time.perf_counter_ns() - begin_ns) / 1e9
            log.warning("%s model=%s engine=%d took_s=%.1f", REPLACED, self._model, index, took_s)
            trace.add("engine lost", begin_ns, track=index, engine=index, reason=reason)
            trace.process.write()
            replaced: Metrics = {
                "rollout/replaced_engines": Sum(1),
                "time/replace_engine_s": Max(took_s),
            }
            self._metrics = merge([self._metrics, replaced])

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return merge([_NONE, metrics])
