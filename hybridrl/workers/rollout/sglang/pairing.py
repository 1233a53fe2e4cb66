"""A decode server and the prefill servers whose keys and values it fetches.

Both halves of a pair get the same request and a common room number. The prefill server samples the
first token; the decode server fetches the entries of the context and answers with all tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.client import Body, Endpoint

log = logging.getLogger(__name__)

_SAMPLES = "/generate"
_ABORTS = "/abort_request"
_ROOM_BITS = 62  # SGLang counts rooms in int64
_ABORT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """A prefill server, as the decode servers reach it."""

    address: KeyedAddress
    endpoint: Endpoint

    def rooms(self, num_responses: int) -> Body:
        """Return the fields by which both halves find each other, for each response."""
        return {
            "bootstrap_host": [self.address.host] * num_responses,
            "bootstrap_port": [self.address.bootstrap_port] * num_responses,
            "bootstrap_room": [secrets.randbits(_ROOM_BITS) for _ in range(num_responses)],
        }


class PairedEndpoint(Endpoint):
    """The own decode server, with each prefill server in turn."""

    caches_contexts = False

    def __init__(self, own: Endpoint, *, prefills: Sequence[KeyedAddress]) -> None:
        """Prepare.

        Args:
            own: the decode server.
            prefills: the other halves; at least one.
        """
        super().__init__(own.base_url, name="the decode server", key=own.key)
        self._own = own
        self._prefills = []
        for address in prefills:
            name = f"the prefill server at {address.url}"
            endpoint = Endpoint(address.url, name=name, key=address.key)
            self._prefills.append(_Prefill(address, endpoint))

    async def request(
        self,
        path: str,
        body: Body | None = None,
        *,
        timeout_s: float | None,
        method: str = "POST",
        session: aiohttp.ClientSession | None = None,
    ) -> Any:  # noqa: ANN401
        """Send requests for tokens, and their aborts, to both halves, others to the decode server.

        Raises:
            EngineError: a half is gone, or refuses; the other one forgets the request.
            DeadlineError: no answer in time.
        """
        given: dict[str, Any] = {"timeout_s": timeout_s, "method": method, "session": session}
        if path == _ABORTS:  # whichever half has it now
            aborts = [each.endpoint.request(path, body, **given) for each in self._prefills]
            await asyncio.gather(*aborts, return_exceptions=True)
        if path != _SAMPLES or body is None:
            return await self._own.request(path, body, **given)
        prefill = self._prefills[0]
        self._prefills = [*self._prefills[1:], prefill]
        body = body | prefill.rooms(len(body["input_ids"]))
        halves = (self._own, prefill.endpoint)
        decoded, filled = (
            asyncio.ensure_future(half.request(path, body, **given)) for half in halves
        )
        try:
            await asyncio.wait((decoded, filled), return_when=asyncio.FIRST_EXCEPTION)
            if filled.done():
                self._require_filled(prefill, filled)
            return decoded.result()
        finally:
            for task, half in zip((decoded, filled), halves, strict=True):
                if not task.done():
                    task.cancel()
                    await _abort(half, body["rid"], session)
            await asyncio.gather(decoded, filled, return_exceptions=True)

    async def loads(self, session: aiohttp.ClientSession | None = None) -> list[Body]:
        """Return the loads of all halves: a context may be computed while nothing is decoded."""
        halves = [self._own, *(each.endpoint for each in self._prefills)]
        loads = await asyncio.gather(*(half.loads(session) for half in halves))
        return list(chain.from_iterable(loads))

    def _require_filled(self, prefill: _Prefill, filled: asyncio.Task[Any]) -> None:
        """Raise the error of a prefill server, which the program then uses no more."""
        try:
            filled.result()
        except (EngineError, DeadlineError) as error:
            if len(self._prefills) > 1 and prefill in self._prefills:
                log.warning("a prefill server is passed over: %s", error)
                self._prefills.remove(prefill)
            raise


async def _abort(
    half: Endpoint, names: Sequence[str], session: aiohttp.ClientSession | None
) -> None:
    """Abort these requests at a half that waits for the other one."""
    for name in names:
        with suppress(EngineError, DeadlineError):
            await half.request(_ABORTS, {"rid": name}, timeout_s=_ABORT_S, session=session)
