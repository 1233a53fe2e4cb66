"""Recovery within a phase: dead engines are found, and replaced while the others serve.

Those that ranks lead are restarted by ``workers/sharding/lifecycle.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hybridrl.metrics import Metrics, merge
from hybridrl.serving.engine_handle import EngineHandle, RankHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.health import HealthMonitor, Losses
from hybridrl.serving.server import RolloutServer

log = logging.getLogger(__name__)

_NUM_TRIES = 3
"""Processes that may fail in a row in place of one engine."""


class Recovery:
    """Watches the engines of one model while a program samples: its server's, and lent ones.

    Lost ones of the server are replaced, each in a thread of its own; a replacement that is not
    ready when a phase ends joins the next one. Lost ones that ranks lend are left out until they
    are lent again: their ranks restart them after the phase.
    """

    def __init__(self, server: RolloutServer, *, health_timeout_s: float, key: str = "") -> None:
        """Watch nothing yet; ``key`` is that which engines of ranks require."""
        self._server = server
        self._key = key
        self._pool: EnginePool | None = None
        self._lent: dict[int, RankHandle] = {}
        """By index in the pool, after the server's own ones."""
        self._reported: set[EngineHandle | None] = set()
        """Lost engines that a thread sees to: until it has noted one, each look reports it."""
        self._losses = Losses("ranks")
        self.monitor = HealthMonitor(self._watched, self.report, timeout_s=health_timeout_s)

    def lend(self, urls: Sequence[str]) -> None:
        """Take these engines of ranks, in their order, in place of those that were lent before."""
        for handle in self._lent.values():
            handle.end()
        self._lent = {
            index: RankHandle(url, key=self._key)
            for index, url in enumerate(urls, start=self._server.num_engines)
        }

    def lost(self) -> tuple[int, ...]:
        """Return the engines that did not work since they were lent, by their order."""
        first = self._server.num_engines
        return tuple(index - first for index, handle in self._lent.items() if handle.is_lost)

    @contextmanager
    def filling(self, pool: EnginePool) -> Iterator[None]:
        """Let lent and new engines join ``pool`` in the block, and replace those that it loses."""
        pool.on_lost = self.report
        self._pool = pool
        self.replace_lost()
        for index, engine in self._server.serving_engines().items():
            pool.join(index, engine)  # it came up after the pool was made
        lent = self._living_lent()
        for index, handle in lent.items():
            pool.join(index, handle)
        self._losses.note_ready(lent)
        try:
            yield
        finally:
            self._pool = None

    def replace_lost(self) -> None:
        """Replace engines that are lost and that nobody replaces; the pool expects them."""
        for index in self._server.claim_lost():
            self._in_thread(index)
        for index in self._server.coming():
            if self._pool is not None:
                self._pool.expect(index)

    def report(self, index: int, handle: EngineHandle, reason: str) -> bool:
        """Lose an engine that failed; return at once whether a replacement comes. Thread-safe."""
        pool = self._pool
        if pool is not None:
            pool.drop(index, handle, reason)
        if isinstance(handle, RankHandle):
            handle.is_lost = True
            self._losses.note_lost([index], reason)
            return False
        if self._server.version < 0:
            return False
        if handle not in self._reported:
            self._reported.add(handle)
            self._in_thread(index, handle, reason)
        return True

    def take_metrics(self) -> Metrics:
        """Return lost engines, and those that are back, since the last call; reset them."""
        return merge([self._server.take_metrics(), self._losses.take_metrics()])

    def _watched(self) -> Mapping[int, EngineHandle]:
        return {**self._server.ready_engines(), **self._living_lent()}

    def _living_lent(self) -> Mapping[int, RankHandle]:
        return {index: handle for index, handle in self._lent.items() if not handle.is_lost}

    # -- in the thread of an engine --------------------------------------------------------------

    def _in_thread(self, *args: object) -> None:
        threading.Thread(target=self._run, args=args, name="recovery", daemon=True).start()

    def _run(self, index: int, handle: EngineHandle | None = None, reason: str = "") -> None:
        """Note the loss of an engine, unless it was claimed, and bring it back or give it up."""
        try:
            if handle is not None and not self._server.lose(index, handle, reason):
                return
            reason = self._replace(index)
        except Exception as error:
            log.exception("a lost rollout engine was not replaced: engine=%d", index)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._reported.discard(handle)
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
            reason = self._server.replace(index)
            if not reason:
                return ""
            log.warning("a replacement of a rollout engine failed: engine=%d: %s", index, reason)
        return f"{_NUM_TRIES} replacements failed, the last one: {reason}"
