"""Servers that do not answer alone: pairs of a decode and a prefill server, and users of encoders.

Both halves of a pair get the same request and a common room number. The prefill server samples the
first token; the decode server fetches the entries of the context and answers with all tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.client import Body, Endpoint, RefusedError
from hybridrl.workers.rollout.sglang.sampling import single_bodies

log = logging.getLogger(__name__)

_SAMPLES = "/generate"
_ABORTS = "/abort_request"
_ROOM_BITS = 62  # SGLang counts rooms in int64
_ABORT_S = 5.0

_NO_EMBEDDING = 503
_BETWEEN_S = 1.0
"""A server looks at its encoders every second, and asks none that did not answer three times
(``arguments.environment``)."""


class PairedEndpoint(Endpoint):
    """The own decode server, with each prefill server in turn."""

    def __init__(self, own: Endpoint, prefills: Sequence[KeyedAddress]) -> None:
        """Pair ``own`` with at least one other half."""
        name = "the decode server"
        super().__init__(own.base_url, name=name, key=own.key, caches_contexts=False)
        self._own = own
        self._prefills = [
            (each, Endpoint(each.url, name=f"the prefill server at {each.url}", key=each.key))
            for each in prefills
        ]

    async def request(self, path: str, body: Body | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Send requests for tokens to both halves; if one fails, the other forgets its own."""
        if path == _ABORTS:  # whichever half has it now
            aborts = [prefill.request(path, body, **given) for _, prefill in self._prefills]
            await asyncio.gather(*aborts, return_exceptions=True)
        if path != _SAMPLES or body is None:
            return await self._own.request(path, body, **given)
        address, prefill = self._prefills[0]
        self._prefills = [*self._prefills[1:], self._prefills[0]]
        num_responses = len(body["input_ids"])
        rooms = [secrets.randbits(_ROOM_BITS) for _ in range(num_responses)]
        body = body | {  # by these both halves find each other, for each response
            "bootstrap_host": [address.host] * num_responses,
            "bootstrap_port": [address.bootstrap_port] * num_responses,
            "bootstrap_room": rooms,
        }
        halves = (self._own, prefill)
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
                    await _abort(half, body["rid"], given.get("session"))
            await asyncio.gather(decoded, filled, return_exceptions=True)

    async def loads(self, session: aiohttp.ClientSession | None = None) -> list[Body]:
        """Return the loads of all halves: a context may be computed while nothing is decoded."""
        halves = [self._own, *(prefill for _, prefill in self._prefills)]
        loads = await asyncio.gather(*(half.loads(session) for half in halves))
        return list(chain.from_iterable(loads))

    def _require_filled(self, prefill: Endpoint, filled: asyncio.Task[Any]) -> None:
        """Raise the error of a prefill server, which the program then uses no more."""
        try:
            filled.result()
        except (EngineError, DeadlineError) as error:
            others = [each for each in self._prefills if each[1] is not prefill]
            if 0 < len(others) < len(self._prefills):
                log.warning("a prefill server is passed over: %s", error)
                self._prefills = others
            raise


async def _abort(
    half: Endpoint, names: Sequence[str], session: aiohttp.ClientSession | None
) -> None:
    """Abort these requests at a half that waits for the other one."""
    for name in names:
        with suppress(EngineError, DeadlineError):
            await half.request(_ABORTS, {"rid": name}, timeout_s=_ABORT_S, session=session)


class EncodedEndpoint(Endpoint):
    """The own server, which asks encoders for images. Requests with images are sent one by one.

    For a request with several responses SGLang 0.5.23 asks no encoder, and computes their images
    itself.
    """

    def __init__(self, own: Endpoint) -> None:
        """Send to ``own``."""
        super().__init__(own.base_url, name=own.name, key=own.key)
        self._own = own

    async def request(self, path: str, body: Body | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Do one call; one that was lost with an encoder is repeated until there is another."""
        if path != "/generate" or body is None or "image_data" not in body:
            return await self._own.request(path, body, **given)
        asked = [self._ask(one, **given) for one in single_bodies(body)]
        answers = await asyncio.gather(*asked, return_exceptions=True)  # none outlives the call
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        return answers

    async def _ask(self, body: Body, **given: Any) -> Any:  # noqa: ANN401
        while True:  # the caller limits the wait
            try:
                return await self._own.request("/generate", body, **given)
            except RefusedError as error:
                if error.status != _NO_EMBEDDING:
                    raise
            await asyncio.sleep(_BETWEEN_S)
