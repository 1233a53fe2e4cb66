"""HTTP to one server: control calls by any thread, generation requests in a program's own loop.

The life cycle decides when a control call is legal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.loop_thread import LoopThread
from hybridrl.sampler import T
from hybridrl.workers.rollout.protocol import LEAST_WAIT_S, left_s
from hybridrl.workers.rollout.sglang.arguments import ServingSpec

log = logging.getLogger(__name__)

Body = dict[str, Any]

_KEEP_ALIVE_S = 2.0
"""The server drops a connection that was idle for 5 s; a request sent just then is lost."""

PROBE_TIMEOUT_S = 5.0
"""Of calls that a busy server answers at once, too."""

_NUM_LOOKS = 4
_FLUSH_WAIT_S = 1.0
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


class ControlCalls:
    """A server that answers, started here or elsewhere, and the calls that an engine makes."""

    client: ControlClient
    info: Body  # its first answer to ``/server_info``: arguments in effect, version, internal state
    start_s: float  # seconds until it answered
    num_ranks: int  # processes that share its model

    def __init__(self, spec: ServingSpec) -> None:
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
        self._start_timeout_s = spec.rollout.start_timeout_s

    def has_died(self) -> bool:
        """Whether it is gone, as far as is known."""
        raise NotImplementedError

    def require_alive(self, what: str) -> None:
        """Raise a ServerDiedError if it is gone: what was asked, and why nobody answers."""
        raise NotImplementedError

    def end(self) -> None:
        """Use it no more. Idempotent."""
        raise NotImplementedError

    # -- names of its weights --------------------------------------------------------------------

    def version_name(self, version: int) -> str:
        """Return the server's name of the weights of a policy version."""
        return str(version)

    def begin_update(self) -> None:
        """Weights are about to be sent. Idempotent until ``stamp``."""

    def stamp(self, name: str) -> None:
        """Name the weights of all later responses."""
        self.post("/update_weight_version", new_version=name, abort_all_requests=False)

    # -- control calls ---------------------------------------------------------------------------

    def post(self, path: str, **body: object) -> Any:  # noqa: ANN401 - as ControlClient.call
        """Do one control call within ``rollout.stage_timeout_s`` and the time left of its stage."""
        return self.client.call(path, body, timeout_s=left_s(self._timeout_s))

    def require_success(self, path: str, **body: object) -> Body:
        """Do one control call as ``post``, whose answer contains its own success."""
        return self.client.run(self.client.succeed(path, body, timeout_s=left_s(self._timeout_s)))

    def load_folder(self, folder: Path, *, load_format: str) -> None:
        """Load all weights of a folder, as in a start: within ``rollout.start_timeout_s``.

        Its files may go when this returns.
        """
        body = {"model_path": str(folder), "load_format": load_format, "flush_cache": False}
        timeout_s = left_s(self._start_timeout_s)
        self.client.run(self.client.succeed("/update_weights_from_disk", body, timeout_s=timeout_s))
        if self.num_ranks > 1:
            # Its first rank answers, while others may still read; it gets no further call to them
            # before they have ended this one.
            self.client.call("/server_info", timeout_s=timeout_s, method="GET")

    def hold(self, *, timeout_s: float) -> None:
        """Admit no request, and verify that none runs and no cache of old weights is left.

        Requests that still run are cut off, whatever their sender, also those kept by the pause of
        another client. A DeadlineError says how many run and wait if it is busy at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._empty(deadline)
            except (RefusedError, DeadlineError) as error:
                log.info("SGLang is still busy: %s", error)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"SGLang is still busy {timeout_s:g} s after its requests were aborted "
                        f"({self._describe_load()}), so its memory cannot be released: {error}"
                    ) from error
                self.post("/continue_generation")  # paused requests cannot end
            else:
                return

    def _empty(self, deadline: float) -> None:
        """Abort all, stop admission, and let the server itself verify that it is idle.

        In this order because ``/pause_generation`` looks only once a second whether all requests
        have ended (0.5.21 to 0.5.23); on an idle server it returns at once.
        """

        def until_deadline_s() -> float:
            return max(LEAST_WAIT_S, deadline - time.monotonic())

        self.client.call("/abort_request", {"abort_all": True}, timeout_s=until_deadline_s())
        wait_s = min(_FLUSH_WAIT_S, until_deadline_s())
        path = f"/flush_cache?timeout={wait_s:.2f}"
        self.client.call(path, timeout_s=wait_s + until_deadline_s())
        # With other modes some requests stay, and the server asserts that there are none when its
        # memory is released.
        self.client.call("/pause_generation", {"mode": "abort"}, timeout_s=until_deadline_s())
        # Again: a request may have arrived before the admission stopped.
        self.client.call("/flush_cache", timeout_s=until_deadline_s())

    def progress(self) -> object:
        """Return its loads with their times, which a paused or hung server does not change."""
        return self.client.run(self.client.loads())

    def _describe_load(self) -> str:
        """Describe how many requests run and wait: figures may be seconds old."""
        try:
            loads = self.client.run(self.client.loads())
        except (EngineError, DeadlineError) as error:
            return f"it does not say how many requests run: {error}"
        return ", ".join(
            f"{load.get('num_running_reqs')} requests running and "
            f"{load.get('num_waiting_reqs')} waiting"
            for load in loads
        )


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


def checksums_of(answer: Body) -> dict[tuple[int, str], str]:
    """Return the checksums in an answer of ``/weights_checker``, by rank and name of the tensor."""
    return {
        (rank, name): str(value)
        for rank, sums in enumerate(answer["ranks"])
        for name, value in sums["checksums"].items()
    }


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
