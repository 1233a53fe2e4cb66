"""A decode server and the prefill servers whose keys and values it fetches.

Both halves of a pair get the same request and a common room number. The prefill server samples the
first token; the decode server fetches the entries of the context and answers with all tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.client import Body, Endpoint
from hybridrl.workers.rollout.sglang.connection import ProgramConnection, without_time

log = logging.getLogger(__name__)

_SAMPLES = "/generate"
_ABORTS = "/abort_request"
_ROOM_BITS = 62  # SGLang counts rooms in int64
_ABORT_S = 5.0


class PairedConnection(ProgramConnection):
    """The own decode server, with each prefill server in turn."""

    caches_contexts = False

    def __init__(self, own: Endpoint, *, prefills: Sequence[KeyedAddress]) -> None:
        """Prepare.

        Args:
            own: the decode server.
            prefills: the other halves; at least one.
        """
        super().__init__(own)
        self._halves = [_PrefillHalf(address) for address in prefills]

    async def _connect(self, connections: AsyncExitStack) -> None:
        await super()._connect(connections)
        for half in self._halves:
            await connections.enter_async_context(half.open())

    async def ask(self, path: str, body: Body, *, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Send requests for tokens, and their aborts, to both halves, others to the decode server.

        Raises:
            EngineError: a half is gone, or refuses; the other one forgets the request.
            DeadlineError: no answer in time.
        """
        if path == _ABORTS:  # whichever half has it now
            await asyncio.gather(
                *(half.ask(path, body, timeout_s=timeout_s) for half in self._halves),
                return_exceptions=True,
            )
        if path != _SAMPLES:
            return await super().ask(path, body, timeout_s=timeout_s)
        half = self._halves[0]
        self._halves = [*self._halves[1:], half]
        body = body | half.rooms(len(body["input_ids"]))
        decoded = asyncio.ensure_future(super().ask(path, body, timeout_s=timeout_s))
        filled = asyncio.ensure_future(half.ask(path, body, timeout_s=timeout_s))
        try:
            await asyncio.wait((decoded, filled), return_when=asyncio.FIRST_EXCEPTION)
            if filled.done():
                self._require_filled(half, filled)
            return decoded.result()
        finally:
            for task, ask in ((decoded, super().ask), (filled, half.ask)):
                if not task.done():
                    task.cancel()
                    await self._abort(ask, body["rid"])
            await asyncio.gather(decoded, filled, return_exceptions=True)

    async def progress(self) -> object:
        """Return the loads of all halves: a context may be computed while nothing is decoded."""
        return await asyncio.gather(super().progress(), *(half.load() for half in self._halves))

    def _require_filled(self, half: _PrefillHalf, filled: asyncio.Task[Any]) -> None:
        """Raise the error of a prefill server, which the program then uses no more."""
        try:
            filled.result()
        except (EngineError, DeadlineError) as error:
            if len(self._halves) > 1 and half in self._halves:
                log.warning("a prefill server is passed over: %s", error)
                self._halves.remove(half)
            raise

    async def _abort(self, ask: Any, names: Sequence[str]) -> None:  # noqa: ANN401
        """Abort these requests at a half that waits for the other one."""
        for name in names:
            with suppress(EngineError, DeadlineError):
                await ask(_ABORTS, {"rid": name}, timeout_s=_ABORT_S)


class _PrefillHalf:
    """A prefill server, as the decode servers reach it."""

    def __init__(self, address: KeyedAddress) -> None:
        self._address = address
        self._endpoint = Endpoint(
            address.url,
            name=f"the prefill server at {address.url}",
            require_alive=lambda _: None,  # its process is another actor's child
            key=address.key,
        )
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        self._session = self._endpoint.open_session()
        return self._session

    async def load(self) -> object:
        return without_time(await self._endpoint.loads(self._session))

    async def ask(self, path: str, body: Body, *, timeout_s: float | None) -> Any:  # noqa: ANN401
        return await self._endpoint.request(path, body, timeout_s=timeout_s, session=self._session)

    def rooms(self, num_responses: int) -> Body:
        """Return the fields by which both halves find each other, for each response."""
        return {
            "bootstrap_host": [self._address.host] * num_responses,
            "bootstrap_port": [self._address.bootstrap_port] * num_responses,
            "bootstrap_room": [secrets.randbits(_ROOM_BITS) for _ in range(num_responses)],
        }
