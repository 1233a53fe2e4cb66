"""The time of requests by the router's own counters (Prometheus), as a metric of the run."""

from __future__ import annotations

import asyncio
import logging
import re

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.rollout.sglang.client import Endpoint

log = logging.getLogger(__name__)

_LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_TIMEOUT_S = 5.0
_SECONDS = "smg_http_request_duration_seconds"
_OF_GENERATE = 'path="/generate"'

Counters = dict[tuple[str, str], float]
"""Values by name and labels."""


class RouterMetrics:
    """Counters of one router since the last time."""

    def __init__(self, url: str) -> None:
        """Begin at zero, as the router does; ``url`` is where it writes its counters."""
        self._endpoint = Endpoint(url, name="the metrics of the router")
        self._before: Counters = {}

    def take(self) -> Metrics:
        """Return the changes under declared names; nothing if the router does not answer."""
        try:
            text = asyncio.run(self._read())
        except (EngineError, DeadlineError) as error:
            log.warning("the router gives no metrics: %s", error)
            return {}
        before, self._before = self._before, read_counters(text)
        return describe({key: n - before.get(key, 0.0) for key, n in self._before.items()})

    async def _read(self) -> str:
        async with self._endpoint.open_session() as session:
            return str(
                await self._endpoint.request(
                    "", timeout_s=_TIMEOUT_S, method="GET", session=session
                )
            )


def read_counters(text: str) -> Counters:
    """Read the lines with labels of Prometheus's text."""
    return {(name, labels): float(value) for name, labels, value in _LINE.findall(text)}


def describe(changes: Counters) -> Metrics:
    """Return the changes of counters under a declared name."""
    seconds, count = (
        sum(
            value
            for (name, labels), value in changes.items()
            if name == f"{_SECONDS}_{part}" and _OF_GENERATE in labels
        )
        for part in ("sum", "count")
    )
    return {"time/routed_request_s": Mean(seconds, count)}
