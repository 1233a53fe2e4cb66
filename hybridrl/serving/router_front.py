"""The router of one model while it serves: servers come and go, and the router itself may die."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, DriftError, EngineError, ServerDiedError
from hybridrl.metrics import Metrics, Sum
from hybridrl.serving.router import NO_SERVER, RouterProcess
from hybridrl.serving.router_metrics import RouterMetrics
from hybridrl.workers.rollout.sglang.client import (
    Body,
    ConnectionLostError,
    Endpoint,
    ServerError,
)

log = logging.getLogger(__name__)

_SEES_DEATH_S = 2.0
"""Seconds until a process whose connections broke is known to be gone."""

_POLL_S = 0.02
_NUM_ROUTES = 5
"""Tries of a request whose server the router did not find: servers came or went meanwhile."""

_CALL_S = 10.0


class RouterFront:
    """Requests to the servers of one model, each to the server that the caller names.

    A router that died is started again, gets its servers back, and the open requests are repeated.
    """

    most_restarts = 3
    """Within one rollout phase."""

    def __init__(
        self,
        *,
        key: str,
        start_timeout_s: float,
        call_timeout_s: float,
    ) -> None:
        """Start the router and wait until it answers; see ``RouterProcess``.

        Args:
            key: of the router and of all its servers.
            start_timeout_s: seconds until it must answer, also after a restart.
            call_timeout_s: seconds of the longest phase.
        """
        self.key = key
        self._start_timeout_s = start_timeout_s
        # The router limits a request's total time; no request must reach that.
        self._arguments = {"request_timeout_secs": int(call_timeout_s) + 60}
        self._router = self._start()
        self._order: list[str] = []
        """Servers as the router counts them."""
        self._failed: dict[str, str] = {}
        self._version = -1
        self._num_restarts = 0
        self._num_answered, self._num_unanswered = 0, 0
        """Requests since the last metrics: a router that dies takes its own counts with it."""
        self._changing = threading.Lock()

    def _start(self) -> RouterProcess:
        router = RouterProcess(
            host="127.0.0.1",
            timeout_s=self._start_timeout_s,
            key=self.key,
            arguments=self._arguments,
        )
        log.info("the router answers: url=%s metrics=%s", router.url, router.metrics_url)
        self._counters = RouterMetrics(router.metrics_url)
        return router

    @property
    def process(self) -> RouterProcess:
        """The router at present."""
        return self._router

    # -- servers ---------------------------------------------------------------------------------

    def serve(self, urls: Collection[str], *, version: int) -> dict[str, str]:
        """Send requests to exactly these servers. Idempotent.

        Args:
            urls: of servers that admit requests.
            version: of the weights that all must have.

        Returns:
            The servers that do not answer, with reasons; they get no request.

        Raises:
            DriftError: a server has other weights.
            EngineError: the router refuses, or does not start again.
            DeadlineError: likewise.
        """
        with self._changing:
            return self._serve(urls, version)

    def _serve(self, urls: Collection[str], version: int) -> dict[str, str]:
        self._version = version
        self._failed = self._verify(set(urls) - set(self._order))
        self._show([url for url in urls if url not in self._failed])
        return self._failed

    def add(self, url: str) -> None:
        """Send requests to this server, too. Idempotent.

        Raises:
            DriftError: it has other weights than the others.
            EngineError: it does not answer; or as ``serve``.
        """
        with self._changing:
            if url not in self._order:
                self._serve([*self._order, url], self._version)
        self._index_of(url)

    def remove_all(self) -> None:
        """Send no more requests to any server: they may pause now. Idempotent."""
        with self._changing:
            if self._order:
                self._show([])

    def _show(self, urls: list[str]) -> None:
        """Send requests to exactly these servers; a router that dies meanwhile is replaced."""
        router, reason = self._router, "it ended between two calls"
        while True:
            try:
                if router.is_alive():
                    shown = [url for url in urls if url not in self._failed]
                    self._order = router.show(shown)
                    return
            except (DeadlineError, ServerDiedError, ConnectionLostError) as error:  # or it hangs
                reason = str(error)
            router.end()
            if self._num_restarts == self.most_restarts:
                raise ServerDiedError(
                    f"the router ended {1 + self.most_restarts} times in one rollout phase: "
                    f"{reason}"
                )
            log.warning("the router is started again: reason=%s", reason)
            self._num_restarts += 1
            self._router = router = self._start()
            self._failed |= self._verify(urls)

    def _verify(self, urls: Collection[str]) -> dict[str, str]:
        """Compare the weights of servers; return those that do not answer, with reasons."""

        async def ask(url: str) -> object:
            server = Endpoint(url, name=f"SGLang at {url}", key=self.key)
            async with server.open_session() as session:
                info = await server.request(
                    "/model_info", timeout_s=_CALL_S, method="GET", session=session
                )
            return info.get("weight_version")

        async def ask_all() -> list[object]:
            return await asyncio.gather(*map(ask, urls), return_exceptions=True)

        answers = dict(zip(urls, asyncio.run(ask_all()), strict=True))
        failed = {url: str(each) for url, each in answers.items() if isinstance(each, Exception)}
        for url in answers.keys() - failed.keys():
            if str(answers[url]) != str(self._version):
                raise DriftError(
                    f"SGLang at {url} has weights of version {answers[url]}, and the policy is at "
                    f"version {self._version}; it gets no requests"
                )
        return failed

    # -- requests --------------------------------------------------------------------------------

    async def generate(self, body: Body, *, url: str, session: aiohttp.ClientSession | None) -> Any:  # noqa: ANN401 - JSON
        """Send one request to the server at ``url``, through the router.

        The caller limits the wait: see ``while_it_works``.

        Raises:
            ServerError: the server refused it, or is gone.
            ServerDiedError: the router ended again and again.
            EngineError: it does not start again.
        """
        num_routes = 0
        while True:
            router = self._router
            try:
                answer = await router.generate(body, index=self._index_of(url), session=session)
                self._num_answered += 1
                return answer
            except ServerError as error:
                num_routes += 1
                if NO_SERVER not in str(error.text) or num_routes == _NUM_ROUTES:
                    self._num_unanswered += 1
                    raise
                await asyncio.sleep(_POLL_S)
                while self._changing.locked():
                    await asyncio.sleep(_POLL_S)
            except (ServerDiedError, ConnectionLostError) as error:
                await self._replace(router, error)

    def _index_of(self, url: str) -> int:
        if url not in self._order:
            reason = self._failed.get(url, "it was removed")
            raise EngineError(f"SGLang at {url} is not behind the router: {reason}")
        return self._order.index(url)

    # -- its death -------------------------------------------------------------------------------

    async def _replace(self, router: RouterProcess, error: Exception) -> None:
        """Start another router, unless another request did."""
        deadline_s = time.monotonic() + _SEES_DEATH_S
        while router.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        if router.is_alive():
            raise error
        await asyncio.to_thread(self._restart_once, router)

    def _restart_once(self, router: RouterProcess) -> None:
        with self._changing:
            if self._router is router:
                self._show(self._order)

    def take_metrics(self) -> Metrics:
        """Describe the time since the last call under declared names. Call it in each phase."""
        restarts, self._num_restarts = self._num_restarts, 0
        answered, self._num_answered = self._num_answered, 0
        unanswered, self._num_unanswered = self._num_unanswered, 0
        return {
            "rollout/router_restarts": Sum(restarts),
            "rollout/routed_requests": Sum(answered + unanswered),
            "rollout/unanswered_routed_requests": Sum(unanswered),
        } | self._counters.take()

    def end(self) -> None:
        """Kill the router. Idempotent."""
        self._router.end()
