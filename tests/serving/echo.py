from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import httpx

from hybridrl.serving.engine_handle import answered
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port


class Addressed:
    """An engine of which the address is asked, and whether its process is there."""

    def __init__(self, url: str | None, process: ChildProcess | None = None) -> None:
        self.url = url
        self._process = process

    def is_alive(self) -> bool:
        return self._process is None or self._process.exit_status() is None

    def address(self) -> Future[str | None]:
        return answered(self.url)


@contextmanager
def echo_server(
    *, seconds: float = 0.0, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[tuple[str, ChildProcess]]:
    """Run ``echo_server.py``, below the command ``within``; a response takes so many seconds."""
    port = free_port()
    url = f"http://{host}:{port}"
    command = [
        *within,
        sys.executable,
        "-m",
        "tests.serving.echo_server",
        str(port),
        str(seconds),
        host,
    ]
    server = ChildProcess(command, name="echo")
    try:
        server.wait_until_ready(lambda: answers(url), timeout_s=60.0)
        yield url, server
    finally:
        server.end()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/model_info").is_success
    except httpx.TransportError:
        return False
