"""Counts of engines that were lost and replaced, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Collection

from hybridrl.metrics import Max, Metrics, Sum, merge

_NONE: Metrics = {"rollout/lost_engines": Sum(0), "rollout/replaced_engines": Sum(0)}


class Losses:
    """Lost engines of one server, by index."""

    def __init__(self) -> None:
        self._lost_at_s: dict[int, float] = {}
        self._metrics: Metrics = {}

    def note_lost(self, members: Collection[int]) -> None:
        """Count engines, unless they are counted and not replaced yet."""
        new = [index for index in members if index not in self._lost_at_s]
        self._lost_at_s.update(dict.fromkeys(new, time.monotonic()))
        lost: Metrics = {"rollout/lost_engines": Sum(len(new))}
        self._metrics = merge([self._metrics, lost])

    def note_ready(self, members: Collection[int]) -> None:
        """Count the lost ones among engines that serve: they were replaced."""
        for index in members:
            if index in self._lost_at_s:
                replaced: Metrics = {
                    "rollout/replaced_engines": Sum(1),
                    "time/replace_engine_s": Max(time.monotonic() - self._lost_at_s.pop(index)),
                }
                self._metrics = merge([self._metrics, replaced])

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return merge([_NONE, metrics])
