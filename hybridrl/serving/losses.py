"""Engines that were lost and replaced: how many, why, and how long that took."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from hybridrl.diagnostics import trace
from hybridrl.metrics import Max, Metrics, Sum, merge

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
        for index in members:
            if index in self._lost:
                self._note_replaced(index, *self._lost.pop(index))

    def _note_replaced(self, index: int, begin_ns: int, reason: str) -> None:
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
