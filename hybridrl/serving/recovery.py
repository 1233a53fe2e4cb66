"""Recovery within a phase: lost engines of a server are replaced while the others serve."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.serving.engine_handle import EngineHandle, SamplingEngine
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.server import RolloutServer

log = logging.getLogger(__name__)

_NUM_TRIES = 3
"""Processes that may fail in a row in place of one engine."""


class Recovery:
    """Watches the engines of one server, and replaces lost ones, each in a thread of its own.

    A replacement that is not ready when a phase ends joins the next one.
    """

    def __init__(
        self, server: RolloutServer, *, start_timeout_s: float, health_timeout_s: float
    ) -> None:
        """Watch nothing yet.

        Args:
            start_timeout_s: seconds that a process may take to start.
            health_timeout_s: seconds within which an engine must get on.
        """
        self._server = server
        self._start_timeout_s = start_timeout_s
        self._pool: EnginePool | None = None
        self.monitor: HealthMonitor[EngineHandle] = HealthMonitor(
            server.ready_engines, self.report, timeout_s=health_timeout_s
        )

    @contextmanager
    def filling(self, pool: EnginePool) -> Iterator[None]:
        """Let replacements join ``pool`` in the block, and replace the engines that it loses."""
        pool.on_lost = self.report
        self._pool = pool
        for index in self._server.claim_lost():
            self._in_thread(index)
        for index in self._server.coming():
            pool.expect(index)
        for index, engine in self._server.serving_engines().items():
            pool.join(index, engine)  # it came up after the pool was made
        try:
            yield
        finally:
            self._pool = None

    def report(self, index: int, handle: SamplingEngine, reason: str) -> bool:
        """Replace an engine that failed; others get its open requests. Any thread; returns at once.

        Returns:
            Whether a replacement comes.
        """
        pool = self._pool
        if pool is not None:
            pool.drop(index, handle, reason)
        if self._server.version < 0:
            return False
        self._in_thread(index, handle, reason)
        return True

    # -- in the thread of an engine --------------------------------------------------------------

    def _in_thread(self, *args: object) -> None:
        threading.Thread(target=self._run, args=args, name="recovery", daemon=True).start()

    def _run(self, index: int, handle: SamplingEngine | None = None, reason: str = "") -> None:
        """Note the loss of an engine, unless it was claimed, and bring it back or give it up."""
        try:
            if handle is not None and not self._server.lose(index, handle, reason):
                return
            reason = self._replace(index)
        except Exception as error:
            log.exception("a lost rollout engine was not replaced: engine=%d", index)
            reason = f"{type(error).__name__}: {error}"
        pool = self._pool
        if reason:
            self._server.give_up(index)
            if pool is not None:
                pool.give_up(index, reason)
        elif pool is not None and (engine := self._server.serving_engines().get(index)):
            pool.join(index, engine)

    def _replace(self, index: int) -> str:
        """Return why an engine is not back after several tries; empty if it serves."""
        for _ in range(_NUM_TRIES):
            reason = self._server.replace(index, timeout_s=self._start_timeout_s)
            if not reason:
                return ""
            log.warning("a replacement of a rollout engine failed: engine=%d: %s", index, reason)
        return f"{_NUM_TRIES} replacements failed, the last one: {reason}"
