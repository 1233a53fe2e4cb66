"""The server that a program samples with, connected in the program's event loop."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from hybridrl.workers.rollout.sglang.client import Body, Endpoint


class ProgramConnection:
    """A server that serves the current program. Enter it in the program's event loop."""

    caches_contexts = True
    """Whether a context that was sent once is computed once."""

    is_open = False

    def __init__(self, endpoint: Endpoint) -> None:
        """Connect when it is entered."""
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._connections = AsyncExitStack()

    @property
    def url(self) -> str:
        """Of the server."""
        return self._endpoint.base_url

    async def __aenter__(self) -> ProgramConnection:
        """Connect."""
        await self._connect(self._connections)
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        self.is_open = False
        await self._connections.aclose()

    async def _connect(self, connections: AsyncExitStack) -> None:
        session = self._endpoint.open_session()
        self._session = await connections.enter_async_context(session)

    async def ask(self, path: str, body: Body, *, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Do one request; see ``Endpoint.request``."""
        return await self._endpoint.request(path, body, timeout_s=timeout_s, session=self._session)

    async def progress(self) -> object:
        """Return its load, which any token changes; not when it was written. See ``loads``."""
        return without_time(await self._endpoint.loads(self._session))


def without_time(loads: list[Body]) -> list[Body]:
    """Return loads that are equal if a scheduler did nothing but write them again."""
    return [{**load, "timestamp": None} for load in loads]
