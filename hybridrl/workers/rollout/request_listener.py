"""Single requests to an engine from outside of its programs: of other threads, or over HTTP.

One program runs while the engine serves, and answers them. The rollout manager asks the engine of a
rank by HTTP, wherever it computes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from aiohttp import web
from pybase64 import b64decode, b64decode_as_bytearray, b64encode
from safetensors import SafetensorError
from safetensors.torch import load, save

from hybridrl.errors import DriftError, EngineError, PhaseError, RequestError, shorten
from hybridrl.images import Image
from hybridrl.json_text import to_json_text
from hybridrl.loop_thread import LoopThread
from hybridrl.network import Door, host_and_port
from hybridrl.sampler import RequestParams, Sample, Sampler, SampleRequest, Scoring
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.sample_parts import parts_of, sample_of

log = logging.getLogger(__name__)

Body = dict[str, Any]

_json = partial(web.json_response, dumps=to_json_text)

_MAX_BODY_BYTES = 1 << 28
_END_S = 1.0

_OPEN_S = 60.0
"""Seconds until the program of an engine must run."""

_SERVE_NOTHING = "a request was refused: the engine is paused; it admits requests after an update"

SAMPLE_ROUTE = "/sample_group"
"""Of a request."""

DRIFTED = 409
"""Status of the answer if the engine has other weights than it should have."""

PROGRESS_ROUTE = "/v1/loads"
"""Says how far an engine is, with the fields of SGLang's route of this name."""


def request_body(request: SampleRequest) -> Body:
    """Write a request; waits for the pixels of its images."""
    return {
        "token_ids": request.token_ids.tolist(),
        "params": asdict(request.params),
        "keys": list(request.keys),
        "images": [_spell_image(image) for image in request.images],
        "is_turn": request.is_turn,
        "scoring": request.scoring,
    }


def read_request(data: bytes) -> SampleRequest:
    """Read a request; RequestError if it is none."""
    try:
        body = json.loads(data)
        token_ids, keys, stops = body["token_ids"], body["keys"], body["params"]["stop_token_ids"]
        params = RequestParams(**{**body["params"], "stop_token_ids": tuple(stops)})
        images = tuple(_read_image(image) for image in body["images"])
        of_images = [n for image in images for n in (image.rows, image.columns, image.identity)]
        scoring = None if body["scoring"] is None else Scoring(*body["scoring"])
        integers = [*token_ids, *keys, *stops, params.max_new_tokens, params.top_k, *of_images]
        integers += scoring or ()
        are_integers = all(type(number) is int for number in integers)
        if not are_integers or {type(params.temperature), type(params.top_p)} - {int, float}:
            raise TypeError("a token, key or parameter is no number, or a list of them")
        tokens = torch.tensor(integers, dtype=torch.int64)[: len(token_ids)]  # all must fit
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # torch's of large numbers
        reason = shorten(f"{type(error).__name__}: {error}")
        raise RequestError(f"not a request for samples: {reason}") from error
    is_turn = body["is_turn"] is True
    return SampleRequest(tokens, params, keys, images, is_turn=is_turn, scoring=scoring)


def answer_body(samples: Sequence[Sample]) -> Body:
    """Write the answer to a request; of a model's own tokens, without images."""
    parts = map(parts_of, samples)
    return {"samples": [[b64encode(save(tensors)).decode(), facts] for tensors, facts in parts]}


def read_answer(body: Body) -> list[Sample]:
    """Read an answer; EngineError if it is none."""
    try:
        return [
            sample_of(load(b64decode(tensors, validate=True)), facts)
            for tensors, facts in body["samples"]
        ]
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise EngineError(f"not an answer with samples: {error!r}") from error


def _spell_image(image: Image) -> Body:
    pixels_HWC = image.fetch()
    return {
        "rows": image.rows,
        "columns": image.columns,
        "identity": image.identity,
        "shape": pixels_HWC.shape,
        "data": b64encode(pixels_HWC.tobytes()).decode(),
    }


def _read_image(fields: Body) -> Image:
    data = b64decode_as_bytearray(fields["data"], validate=True)
    pixels_HWC = np.frombuffer(data, dtype=np.uint8).reshape(fields["shape"])
    return Image(fields["rows"], fields["columns"], fields["identity"], pixels_HWC)


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

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        """Begin to sample; PhaseError if none is admitted. The future ends with the program."""
        answer: Future[list[Sample]] = Future()
        answer.set_running_or_notify_cancel()  # a caller that goes away does not cancel it
        with self._lock:
            session = self._session
            if session is None or session.is_closed:
                raise PhaseError(_SERVE_NOTHING)
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
        self, session: _Session, request: SampleRequest, answer: Future[list[Sample]]
    ) -> None:
        samples, error = [], None
        try:
            samples = await session.sampler.answer(request)
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
        if opened.exception() is not None:
            return
        session = opened.result()
        with self._lock:
            session.is_closed = session.has_ended = True
            left, session.pending = session.pending, set()
        for answer in left:
            answer.set_exception(EngineError(f"a request got no answer: {reason}"))

    async def _program(self, opened: Future[_Session], sampler: Sampler) -> None:
        session = _Session(asyncio.get_running_loop(), sampler)
        opened.set_result(session)
        while True:
            with self._lock:
                session.has_ended = session.is_closed and not session.pending
            if session.has_ended:
                return
            session.changed.clear()
            await session.changed.wait()


class RequestListener:
    """Listens for requests to an engine of this process, and answers while it is open."""

    def __init__(self, engine: RolloutEngine, *, door: Door) -> None:
        """Listen on a free port of ``door``, whose key callers must send; refuse all requests."""
        self._engine = engine
        self._requests = RequestProgram(engine)
        self._door = door
        self._loop = LoopThread("request listener")
        self._url = self._loop.run(self._listen())

    def open(self) -> str:
        """Admit requests; the engine must do so, too. Returns the URL. Idempotent."""
        self._requests.open()
        return self._url

    def close(self) -> None:
        """Admit no further request. Idempotent."""
        self._requests.close()

    def end(self) -> None:
        """Listen no more, and close all connections. Idempotent."""
        if self._loop.has_ended:
            return
        self._requests.close()
        self._loop.run(self._runner.cleanup())
        self._loop.end()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post(SAMPLE_ROUTE, self._sample)
        app.router.add_get(PROGRESS_ROUTE, self._progress)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_END_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._door.host, 0).start()
        return f"http://{host_and_port(self._door.host, self._runner.addresses[0][1])}"

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Require the key, and answer an error with its words."""
        _, _, key = request.headers.get("Authorization", "").rpartition(" ")
        if not secrets.compare_digest(key.encode(errors="replace"), self._door.key.encode()):
            return _json({"error": "the key is wrong"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except RequestError as error:  # each engine would refuse it
            return _json({"error": str(error)}, status=400)
        except DriftError as error:
            return _json({"error": str(error)}, status=DRIFTED)
        except (EngineError, PhaseError) as error:
            return _json({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def _sample(self, request: web.Request) -> web.Response:
        answer = self._requests.answer(read_request(await request.read()))
        samples = await asyncio.wrap_future(answer)
        return _json(answer_body(samples))

    async def _progress(self, _: web.Request) -> web.Response:
        await asyncio.wrap_future(self._requests.turn())
        moment = await asyncio.to_thread(self._engine.progress)
        return _json({"loads": [{"timestamp": moment}]})
