"""sglang-router as a child process: it chooses a server for each request.

What it does was tried with 0.3.2. It knows no pause, takes a restarted server for the one before,
and repeats a request without a word. So its repeats, circuits and health checks are off, and it
has a server only while that admits requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.network import LOOPBACK
from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.process import ChildProcess, end_with_parent, free_port

_PACKAGE = "sglang_router"
_CALL_S = 10.0
_POLL_S = 0.02


class RouterProcess:
    """One router in front of the servers of one model. Its key is that of its servers, too."""

    def __init__(
        self, *, key: str, timeout_s: float, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Start it, and wait until it answers; an error has the end of its log."""
        if find_spec(_PACKAGE) is None:
            raise EngineError("sglang-router is not installed; pip install 'hybridrl[sglang]'")
        self._key = key
        port = free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        self._timeout_s = timeout_s
        given = {
            "host": LOOPBACK,
            "port": port,
            "prometheus_host": LOOPBACK,
            "prometheus_port": free_port(),  # else it takes one that another router has
            "api_key": key,
            "log_level": "warn",
            "policy": "cache_aware",
            "disable_retries": True,  # a repeat would be a second sampling that nobody counts
            "disable_circuit_breaker": True,
            "disable_health_check": True,  # a busy server would get no requests for a while
            **(arguments or {}),
        }
        command = [sys.executable, "-m", __name__]
        self.process = ChildProcess(command, name="the router", arguments=given)
        self.client = ControlClient(
            self.url, name="the router", require_alive=self.process.require_alive, key=key
        )
        try:
            self.process.wait_until_ready(self._answers, timeout_s=timeout_s)
        except BaseException:
            self.end()
            raise

    def show(self, urls: Collection[str]) -> None:
        """Give it exactly these servers, and wait; a DeadlineError if it does not take them."""
        known = {worker["url"]: worker["id"] for worker in self._list()}
        gone = [f"/workers/{known[url]}" for url in known.keys() - set(urls)]
        new = [{"url": url, "api_key": self._key} for url in urls if url not in known]

        async def change() -> None:
            request = partial(self.client.request, timeout_s=_CALL_S)
            await asyncio.gather(
                *(request(path, method="DELETE") for path in gone),
                *(request("/workers", body) for body in new),
            )

        self.client.run(change())
        deadline_s = time.monotonic() + self._timeout_s
        while self.workers() != dict.fromkeys(urls, True):
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"the router does not have the servers {sorted(urls)} after "
                    f"{self._timeout_s:g} s\n{self.process.tail()}"
                )
            time.sleep(_POLL_S)

    def workers(self) -> dict[str, bool]:
        """Return the addresses of its servers, and whether it takes each for healthy."""
        return {worker["url"]: bool(worker["is_healthy"]) for worker in self._list()}

    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self.process.exit_status() is None

    def probe(self) -> Future[object]:
        """Return when it answered, by a monotonic clock. The future may hold an error."""

        async def ask() -> object:
            await self.client.request("/liveness", timeout_s=_CALL_S, method="GET")
            return time.monotonic()

        try:
            return self.client.start(ask())
        except EngineError as error:  # it was ended just now
            failed: Future[object] = Future()
            failed.set_exception(error)
            return failed

    def end(self) -> None:
        """Kill it. Idempotent."""
        self.client.close()
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
        answer = self.client.call("/workers", timeout_s=_CALL_S, method="GET")
        workers: list[dict[str, Any]] = answer["workers"]
        return workers


def route(file: Path) -> None:
    """Run a router with the arguments in ``file``, until the parent is gone: the child's part.

    ``sglang_router.launch_router`` would do the same, but imports all of SGLang: 8 s.
    """
    end_with_parent()
    router = import_module("sglang_router.router").Router  # by name: it need not be installed
    arguments = import_module("sglang_router.router_args").RouterArgs
    import_module("setproctitle").setproctitle("sglang::router")
    router.from_args(arguments(**json.loads(file.read_text(encoding="utf-8")))).start()


if __name__ == "__main__":
    route(Path(sys.argv[1]))
