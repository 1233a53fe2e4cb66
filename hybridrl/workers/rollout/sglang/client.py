"""HTTP to one server: control calls by any thread, generation requests in a program's own loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.loop_thread import LoopThread
from hybridrl.sampler import T

Body = dict[str, Any]

_KEEP_ALIVE_S = 2.0
"""The server drops a connection that was idle for 5 s; a request sent just then is lost."""

PROBE_TIMEOUT_S = 5.0
"""Of calls that a busy server answers at once, too."""

_NUM_LOOKS = 4
_FAIL_S = 5.0
"""How long a request may take to fail when its connection was closed."""

_NOT_SENT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
_NO_HTTP = (aiohttp.ClientError, UnicodeDecodeError)

_OK = 200
_LEAST_SERVER_FAULT = 500


class RefusedError(EngineError):
    """The server answered, and refused: by its status, or within an answer of status 200."""

    def __init__(self, path: str, status: int, text: str) -> None:
        how = "failed" if status == _OK else f"was answered with status {status}"
        super().__init__(f"{path} {how}: {text}")
        self.status = status
        self.text = text

    @property
    def is_servers_fault(self) -> bool:
        """Whether another server, or this one later, may accept the request."""
        return self.status >= _LEAST_SERVER_FAULT


class ConnectionLostError(EngineError):
    """No answer arrived: the connection broke, or the request was cut off."""


@dataclass(eq=False)
class Endpoint:
    """Sends requests to one server, in the event loop of the caller. Connects when first used."""

    base_url: str  # as ``http://127.0.0.1:30000``
    _: KW_ONLY
    name: str
    # Raises if the server's process is gone; asked when a connection breaks. Nobody here knows of
    # another machine's or process's child.
    require_alive: Callable[[str], None] = lambda what: None
    key: str = field(default="", repr=False)  # that the server requires; empty: it requires none
    caches_contexts: bool = True  # whether a context that was sent once is computed once
    num_lost: int = field(default=0, init=False)  # connections that were lost in a row
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def request(
        self,
        path: str,
        body: Body | None = None,
        *,
        timeout_s: float | None,
        method: str = "POST",
        session: aiohttp.ClientSession | None = None,
    ) -> Any:  # noqa: ANN401
        """Do one call, as ``ControlClient.call`` does; to be awaited on the loop of ``session``.

        Without a session the client's own is used, on the client's loop. Without ``timeout_s`` the
        caller limits the wait: see ``while_it_works``.
        """
        if session is None:
            session = self._session = self._session or open_session()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with session.request(
                method,
                self.base_url + path,
                json=body,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=timeout,
                allow_redirects=False,  # the key is for this server
            ) as answer:
                text = await answer.text()
            if self.key:  # /server_info repeats it, and texts are logged
                text = text.replace(self.key, "(key)")
            self.num_lost = 0
        except TimeoutError as error:
            self.require_alive(path)
            raise DeadlineError(
                f"{path}: {self.name} did not answer within {timeout_s:g} s"
            ) from error
        except _NOT_SENT as error:
            self.require_alive(path)
            self.num_lost += 1
            raise ConnectionLostError(f"{path}: {self.name} did not answer: {error}") from error
        except _NO_HTTP as error:
            raise EngineError(
                f"{path}: {self.name} did not answer in HTTP ({type(error).__name__}); is another "
                "program on its port?"
            ) from None  # whose text may repeat what was sent
        if answer.status // 100 != 2:
            raise RefusedError(path, answer.status, _message_of(text))
        return _parsed(text)

    async def succeed(self, path: str, body: Body, *, timeout_s: float) -> Body:
        """Do one call whose answer contains its own success; a failure is a RefusedError, too."""
        answer = await self.request(path, body, timeout_s=timeout_s)
        said: Body = answer if isinstance(answer, dict) else {"success": False}
        if not said.get("success", True):
            reason = said.get("message") or said.get("error_message") or answer
            raise RefusedError(path, _OK, str(reason))
        return said

    async def loads(self, session: aiohttp.ClientSession | None = None) -> list[Body]:
        """Return the load of each data rank; an idle scheduler writes it once a second."""
        answer = await self.request(
            "/v1/loads", timeout_s=PROBE_TIMEOUT_S, method="GET", session=session
        )
        loads: list[Body] = answer.get("loads", []) if isinstance(answer, dict) else []
        return loads


@dataclass(eq=False)
class ControlClient(Endpoint):
    """Talks to one server by an event loop in a thread of its own. Thread-safe."""

    def __post_init__(self) -> None:
        self._loop = LoopThread(self.name)

    def call(
        self, path: str, body: Body | None = None, *, timeout_s: float, method: str = "POST"
    ) -> Any:  # noqa: ANN401 - what a server answers is known to the caller alone
        """Do one control call and return the answer: JSON if it is JSON, else text.

        RefusedError: the status is not 2xx. ConnectionLostError: no answer came, and the process
        lives. EngineError: the server is gone. DeadlineError: no answer within ``timeout_s``.
        """
        return self.run(self.request(path, body, timeout_s=timeout_s, method=method))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's loop and wait for it."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the client's loop, without waiting; EngineError if it was closed."""
        if self._loop.has_ended:
            work.close()
            raise EngineError(f"{self.name} was ended, and is asked for something; restart it")
        return self._loop.start(work)

    def close(self) -> None:
        """Drop all connections, fail the requests in flight, and end the thread. Idempotent."""
        if not self._loop.has_ended:
            self._loop.run(self._close())
            self._loop.end()

    async def _close(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        if self._session is not None:
            await self._session.close()
        if requests:
            await asyncio.wait(requests, timeout=_FAIL_S)
        await asyncio.sleep(0)  # a transport that was closed is freed in the next round of the loop


@asynccontextmanager
async def while_it_works(
    progress: Callable[[], Awaitable[object]], *, timeout_s: float, name: str
) -> AsyncIterator[None]:
    """Let the block wait for an engine: behind others, or for a long response, as long as it takes.

    ``progress`` returns how far the engine is; it is asked four times in ``timeout_s``
    (``rollout.request_timeout_s``), and must be further by then: else a DeadlineError. An error is
    no progress.
    """
    loop = asyncio.get_running_loop()

    async def watch(limit: asyncio.Timeout) -> None:
        last: object = None
        while True:
            await asyncio.sleep(timeout_s / _NUM_LOOKS)
            with suppress(EngineError, PhaseError, DeadlineError):
                now = await progress()
                if now != last and not limit.expired():
                    last = now
                    limit.reschedule(loop.time() + timeout_s)

    try:
        async with asyncio.timeout(timeout_s) as limit:
            watching = asyncio.ensure_future(watch(limit))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError as error:
        if isinstance(error, DeadlineError):  # of the block
            raise
        raise DeadlineError(
            f"{name} made no progress within rollout.request_timeout_s={timeout_s:g} s; raise it "
            "if an engine may compute for longer before a token"
        ) from error


def open_session() -> aiohttp.ClientSession:
    """Return connections of the current event loop; the caller closes them."""
    # No limit: the server queues, and knows best the order of requests.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector)


def _parsed(text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message_of(text: str) -> str:
    """Return the message within an error's body, whichever of the server's forms it has."""
    body = _parsed(text)
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)
    return str(body).strip() or "(no text)"
