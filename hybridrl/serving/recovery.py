"""Recovery within a phase: lost engines of a server are replaced while the others serve."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hybridrl.config.serving import ServingConfig
from hybridrl.serving.engine_handle import EngineHandle, SamplingEngine
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.server import RolloutServer

log = logging.getLogger(__name__)

_NUM_TRIES = 3
"""Processes that may fail in a row in place of one engine, within a phase."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A process on its way."""

    future: Future[None]
    deadline_s: float
    """By ``time.monotonic``."""


class Recovery:
    """Replaces lost engines of one server, in a thread of its own.

    A replacement that is not ready when a phase ends joins the next one.
    """

    def __init__(self, server: RolloutServer, *, start_timeout_s: float) -> None:
        """Begin.

        Args:
            start_timeout_s: seconds that a process may take to start.
        """
        self._server = server
        self._start_timeout_s = start_timeout_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._starts: dict[int, _Start] = {}
        self._num_failed: Counter[int] = Counter()
        self._pool: EnginePool | None = None
        self._lock = threading.Lock()
        """Held while work is handed to the thread, so that none comes behind its end."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._thread.start()

    @contextmanager
    def filling(self, pool: EnginePool) -> Iterator[None]:
        """Let replacements join ``pool`` in the block, and replace the engines that it loses."""
        self._do(partial(self._open, pool))
        try:
            yield
        finally:
            self._do(self._close)

    def report(self, index: int, handle: SamplingEngine, reason: str) -> bool:
        """Replace an engine that failed; others get its open requests. Any thread; returns at once.

        Returns:
            Whether a replacement comes.
        """
        pool = self._pool
        if pool is not None:
            pool.drop(index, handle, reason)
        if self._server.version < 0 or self._num_failed[index] >= _NUM_TRIES:
            return False
        self._put(index, partial(self._lose, index, handle, reason))
        return True

    def end(self) -> None:
        """End the thread; from now on nothing is replaced. Idempotent."""
        with self._lock:
            self._has_ended = True
            self._work.put(None)
        self._thread.join()

    # -- in the thread ---------------------------------------------------------------------------

    def _put(self, index: int, work: Callable[[], None]) -> None:
        """Let the thread do ``work`` on an engine; after an error none is expected any more."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                log.exception("a lost rollout engine was not replaced: engine=%d", index)
                self._give_up(index, f"{type(error).__name__}: {error}")

        self._work.put(run)

    def _do(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread, and wait for it; a no-op after the end."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if self._has_ended:
                return
            self._work.put(run)
        done.result()

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=self._wait_s())
            except queue.Empty:
                self._drop_late_starts()
                continue
            if work is None:
                return
            work()

    def _wait_s(self) -> float | None:
        if not self._starts:
            return None
        first_s = min(start.deadline_s for start in self._starts.values())
        return max(0.0, first_s - time.monotonic())

    def _open(self, pool: EnginePool) -> None:
        self._num_failed.clear()
        self._pool = pool
        pool.on_lost = self.report
        self._start()
        for index in filter(self._server.answers, self._starts):
            pool.expect(index)

    def _close(self) -> None:
        self._pool = None

    def _lose(self, index: int, handle: SamplingEngine, reason: str) -> None:
        if self._server.lose(index, handle, reason):
            self._start()

    def _start(self) -> None:
        for index, future in self._server.start_replacements().items():
            self._starts[index] = _Start(future, time.monotonic() + self._start_timeout_s)
            future.add_done_callback(partial(self._note_start, index))

    def _note_start(self, index: int, future: Future[None]) -> None:
        self._put(index, partial(self._bring_up, index, future))

    def _bring_up(self, index: int, future: Future[None]) -> None:
        """Let a process that has started, or failed to, take the place of the lost engine."""
        start = self._starts.get(index)
        if start is None or start.future is not future:
            return
        del self._starts[index]
        if not self._server.bring_up(index):
            self._fail(index, str(future.exception() or "it did not get the weights; see the log"))
        elif self._pool is not None and (engine := self._server.serving_engines().get(index)):
            self._pool.join(index, engine)

    def _drop_late_starts(self) -> None:
        for index, start in list(self._starts.items()):
            if time.monotonic() >= start.deadline_s:
                del self._starts[index]
                self._server.drop_replacement(index)
                self._fail(index, f"it did not start within {self._start_timeout_s:g} s")

    def _fail(self, index: int, reason: str) -> None:
        log.warning("a replacement of a rollout engine failed: engine=%d: %s", index, reason)
        self._num_failed[index] += 1
        if self._num_failed[index] < _NUM_TRIES:
            self._start()
        else:
            self._give_up(index, f"{_NUM_TRIES} replacements failed, the last one: {reason}")

    def _give_up(self, index: int, reason: str) -> None:
        if self._pool is not None:
            self._pool.give_up(index, reason)


def watch_engines(
    server: RolloutServer, recovery: Recovery, config: ServingConfig
) -> HealthMonitor[EngineHandle]:
    """Return the monitor of all engines of a server, paused. It reports to the recovery."""
    return HealthMonitor(server.ready_engines, recovery.report, timeout_s=config.health_timeout_s)
