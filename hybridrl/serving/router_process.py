"""sglang-router as a child process: it chooses a server for each request.

What it does was tried with 0.3.2. It knows no pause, takes a restarted server for the one before,
and repeats a request without a word. So its repeats, circuits and health checks are off, and it
has a server only while that admits requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.network import host_and_port
from hybridrl.workers.rollout.sglang.client import Body, ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port

log = logging.getLogger(__name__)

_CHILD = "hybridrl.serving.router_child"
_PACKAGE = "sglang_router"
_CALL_S = 10.0
_POLL_S = 0.02


class RouterProcess:
    """One router in front of the servers of one model. Its key is that of its servers, too."""

    def __init__(
        self,
        *,
        host: str,
        timeout_s: float,
        key: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Start it and wait until it answers.

        Args:
            host: address to listen at: loopback, or this node's address in the cluster.
            timeout_s: seconds until it must answer.
            key: that clients must send, and servers get from it; None makes one.
            arguments: of the router that differ, by their Python names.

        Raises:
            EngineError: sglang-router is not installed, or it ended; with the end of its log.
            DeadlineError: it did not answer in time.
        """
        if find_spec(_PACKAGE) is None:
            raise EngineError("sglang-router is not installed; pip install 'hybridrl[sglang]'")
        self.key = key or secrets.token_urlsafe()
        port, metrics_port = free_port(), free_port()
        self.url = f"http://{host_and_port(host, port)}"
        self._timeout_s = timeout_s
        given = _arguments(host, port, metrics_port, self.key) | dict(arguments or {})
        command = [sys.executable, "-m", _CHILD]
        self.process = ChildProcess(command, name="the router", arguments=given)
        self._client = ControlClient(
            self.url, name="the router", require_alive=self.process.require_alive, key=self.key
        )
        try:
            self.start_s = self.process.wait_until_ready(self._answers, timeout_s=timeout_s)
        except BaseException:
            self.end()
            raise

    def show(self, urls: Collection[str]) -> None:
        """Send requests to exactly these servers, and wait until it does so. Idempotent.

        Running requests are not cut off.

        Args:
            urls: of servers that answer.

        Raises:
            EngineError: the router is gone, or refuses an address.
            DeadlineError: it does not take a server, or does not let it go.
        """
        known = {worker["url"]: worker["id"] for worker in self._list()}
        gone = [f"/workers/{known[url]}" for url in known.keys() - set(urls)]
        new = [{"url": url, "api_key": self.key} for url in urls if url not in known]

        async def change() -> None:
            request = partial(self._client.request, timeout_s=_CALL_S)
            await asyncio.gather(
                *(request(path, method="DELETE") for path in gone),
                *(request("/workers", body) for body in new),
            )

        self._client.run(change())
        wanted = dict.fromkeys(urls, True)
        self._wait(lambda: self.workers() == wanted, f"does not have the servers {sorted(urls)}")

    async def generate(self, body: Body, *, session: aiohttp.ClientSession | None) -> Any:  # noqa: ANN401 - JSON
        """Send one request to a server of the router's choice.

        The caller limits the wait: see ``while_it_works``.

        Raises:
            RefusedError: the server refuses it, or is gone; or there is none.
            ServerDiedError: the router is gone.
            ConnectionLostError: no answer, and the router lives.
        """
        return await self._client.request("/generate", body, timeout_s=None, session=session)

    def workers(self) -> dict[str, bool]:
        """Return the addresses of its servers, and whether it takes each for healthy.

        Raises:
            EngineError: the router is gone.
        """
        return {worker["url"]: bool(worker["is_healthy"]) for worker in self._list()}

    def require_alive(self, what: str) -> None:
        """Raise ServerDiedError if the process is gone; ``what`` was to be done."""
        self.process.require_alive(what)

    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self.process.exit_status() is None

    def probe(self) -> Future[object]:
        """Return when it answered, by a monotonic clock. The future may hold an error."""

        async def ask() -> object:
            await self._client.request("/liveness", timeout_s=_CALL_S, method="GET")
            return time.monotonic()

        try:
            return self._client.start(ask())
        except EngineError as error:  # it was ended just now
            failed: Future[object] = Future()
            failed.set_exception(error)
            return failed

    def kill(self) -> None:
        """Kill its processes: requests that it has fail at once. Idempotent."""
        self.process.end()

    def end(self) -> None:
        """Kill it. Idempotent."""
        self._client.close()
        self.process.end()

    def _answers(self) -> bool:
        """Whether it answers; the port may be another process's, which does not know the key."""
        try:
            self._list()
        except RefusedError as error:
            raise EngineError(
                f"another process answers on the port of the router: {error}"
            ) from error
        except (EngineError, DeadlineError):
            return False
        return True

    def _list(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("/workers", method="GET")["workers"]
        return workers

    def _call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:  # noqa: ANN401 - JSON
        return self._client.call(path, body, timeout_s=_CALL_S, method=method)

    def _wait(self, is_done: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"the router {otherwise} after {self._timeout_s:g} s\n{self.process.tail()}"
                )
            time.sleep(_POLL_S)


def _arguments(host: str, port: int, metrics_port: int, key: str) -> dict[str, object]:
    return {
        "host": host,
        "port": port,
        "prometheus_host": host,
        "prometheus_port": metrics_port,  # else it takes one that another router has
        "api_key": key,
        "log_level": "warn",
        "policy": "cache_aware",
        "disable_retries": True,  # a repeat would be a second sampling that nobody counts
        "disable_circuit_breaker": True,
        "disable_health_check": True,  # a busy server would get no requests for a while
    }
