"""Single requests of other threads, answered by one program that runs while the engine serves."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from hybridrl.errors import EngineError, PhaseError
from hybridrl.sampler import RequestParams, Sample, Sampler
from hybridrl.workers.rollout.protocol import RolloutEngine

log = logging.getLogger(__name__)

_OPEN_S = 60.0
"""Seconds until the program of an engine must run."""

_SERVE_NOTHING = "a request was refused: the engine is paused; it admits requests after an update"


@dataclass(slots=True, eq=False)
class _Session:
    """One run of the program, from its first request to its last."""

    loop: asyncio.AbstractEventLoop
    sampler: Sampler
    pending: set[Future[list[Sample]]] = field(default_factory=set)
    is_closed: bool = False
    has_ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RequestProgram:
    """Keeps one program running on an engine, through which any thread may sample."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Admit requests; the engine must do so too, else its error is raised. Idempotent."""
        with self._lock:
            if self._session is not None and not self._session.has_ended:
                self._session.is_closed = False  # before its last request had ended
                return
        if self._thread is not None:
            self._thread.join(_OPEN_S)
        opened: Future[_Session] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="requests", daemon=True
        )
        self._thread.start()
        self._session = opened.result(_OPEN_S)

    def close(self) -> None:
        """Admit no further request; the program ends with the last admitted one. Idempotent."""
        with self._lock:
            session = self._session
            if session is not None and not session.is_closed:
                session.is_closed = True
                with suppress(RuntimeError):  # the engine failed: the program's loop is closed
                    session.loop.call_soon_threadsafe(session.changed.set)

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Begin to sample; see ``Sampler``. PhaseError if no request is admitted now.

        The future ends with the request, or with the program.
        """
        answer: Future[list[Sample]] = Future()
        answer.set_running_or_notify_cancel()  # a caller that goes away does not cancel it
        with self._lock:
            session = self._session
            if session is None or session.is_closed:
                raise PhaseError(_SERVE_NOTHING)
            request = partial(session.sampler.sample_group, token_ids, params, keys=keys)
            try:
                session.loop.call_soon_threadsafe(
                    lambda: session.loop.create_task(self._answer(session, request, answer))
                )
            except RuntimeError as error:  # the engine failed: the program's loop is closed
                raise PhaseError(_SERVE_NOTHING) from error
            session.pending.add(answer)
        return answer

    def turn(self) -> Future[None]:
        """Return a future that ends when the program's loop turns: between steps of decoding."""
        turned: Future[None] = Future()
        with self._lock:
            session = self._session
            try:
                if session is not None and not session.has_ended:
                    session.loop.call_soon_threadsafe(turned.set_result, None)
                    return turned
            except RuntimeError:  # the engine failed: the program's loop is closed
                pass
        turned.set_result(None)
        return turned

    async def _answer(
        self,
        session: _Session,
        request: partial[Coroutine[Any, Any, list[Sample]]],
        answer: Future[list[Sample]],
    ) -> None:
        samples, error = [], None
        try:
            samples = await request()
        except Exception as failure:
            error = failure
        with self._lock:
            session.pending.discard(answer)
        if error is None:
            answer.set_result(samples)
        else:
            answer.set_exception(error)
        session.changed.set()

    def _run(self, opened: Future[_Session]) -> None:
        """Run the program to its end; requests that it leaves open end with an error."""
        reason = "the engine was drained before the request ended"
        try:
            self._engine.run(partial(self._program, opened))
        except Exception as error:  # of the engine; each request gets it
            reason = f"{type(error).__name__}: {error}"
            if not opened.done():
                opened.set_exception(error)
            log.warning("the program of the requests ended: %s", reason)
        if opened.exception() is None:
            self._abandon(opened.result(), reason)

    async def _program(self, opened: Future[_Session], sampler: Sampler) -> None:
        session = _Session(asyncio.get_running_loop(), sampler)
        opened.set_result(session)
        while not self._may_end(session):
            session.changed.clear()
            await session.changed.wait()

    def _may_end(self, session: _Session) -> bool:
        with self._lock:
            session.has_ended = session.is_closed and not session.pending
            return session.has_ended

    def _abandon(self, session: _Session, reason: str) -> None:
        with self._lock:
            session.is_closed = session.has_ended = True
            left, session.pending = session.pending, set()
        for answer in left:
            answer.set_exception(EngineError(f"a request got no answer: {reason}"))
