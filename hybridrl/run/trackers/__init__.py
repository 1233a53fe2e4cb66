"""Targets of metrics besides the run folder: one module each, imported on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

MAX_FAILED = 3


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the finite metrics of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Drop, if possible, the steps after ``step``: they will be repeated."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


@dataclass(slots=True)
class TolerantTracker:
    """A tracker whose errors end no run. The log names the first and the last one."""

    name: str
    tracker: Tracker
    num_failed: int = 0

    def attempt(self, call: Callable[[Tracker], None]) -> None:
        """Call the tracker, and note an error."""
        try:
            call(self.tracker)
        except Exception as error:  # of any kind: trackers are foreign packages
            self.num_failed += 1
            if self.num_failed in (1, MAX_FAILED):
                log.warning(
                    "tracking.trackers=[%s] failed: %s: %s; the run continues; metrics.jsonl has "
                    "every step. This was failure %d; after %d the tracker gets no more",
                    *(self.name, type(error).__name__, error, self.num_failed, MAX_FAILED),
                )
