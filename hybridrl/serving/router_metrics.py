"""The router's own counters (Prometheus), as metrics of the run."""

from __future__ import annotations

import asyncio
import logging
import re

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.workers.rollout.sglang.client import Endpoint

log = logging.getLogger(__name__)

_LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_TIMEOUT_S = 5.0
_REQUESTS = "smg_router_requests_total"
_ANSWERS = "smg_router_upstream_responses_total"
_SECONDS = "smg_http_request_duration_seconds"
_OF_GENERATE = 'path="/generate"'
_SUCCESS = 'status_code="200"'

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
    """Return the changes of counters under declared names."""

    def total(name: str, *, of: str = "", without: str = "\0") -> float:
        return sum(
            value
            for (known, labels), value in changes.items()
            if known == name and of in labels and without not in labels
        )

    return {
        "rollout/routed_requests": Sum(total(_REQUESTS)),
        "rollout/unanswered_routed_requests": Sum(total(_ANSWERS, without=_SUCCESS)),
        "time/routed_request_s": Mean(
            total(f"{_SECONDS}_sum", of=_OF_GENERATE), total(f"{_SECONDS}_count", of=_OF_GENERATE)
        ),
    }
