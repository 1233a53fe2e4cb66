"""HTTP for the engine of a rank: the rollout manager asks it, wherever it computes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from hybridrl.errors import DriftError, EngineError, PhaseError, RequestError
from hybridrl.json_text import to_json_text
from hybridrl.loop_thread import LoopThread
from hybridrl.network import Door, host_and_port
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_program import RequestProgram
from hybridrl.workers.rollout.sample_messages import (
    DRIFTED,
    PROGRESS_ROUTE,
    SAMPLE_ROUTE,
    answer_body,
    read_request,
)

log = logging.getLogger(__name__)

_json = partial(web.json_response, dumps=to_json_text)

_MAX_BODY_BYTES = 1 << 26
_END_S = 1.0


class RequestListener:
    """Listens for requests to an engine of this process, and answers while it is open."""

    def __init__(self, engine: RolloutEngine, *, door: Door) -> None:
        """Listen on a free port, and refuse all requests.

        Args:
            door: address of this machine, and the key that callers must send.
        """
        self._engine = engine
        self._requests = RequestProgram(engine)
        self._door = door
        self._loop = LoopThread("request listener")
        self._url = self._loop.run(self._listen())

    def open(self) -> str:
        """Admit requests; the engine must do so, too. Returns the URL. Idempotent.

        Raises:
            EngineError: the engine cannot answer any.
        """
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
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
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
        tokens, params, keys = read_request(await request.read())
        samples = await asyncio.wrap_future(self._requests.sample_group(tokens, params, keys=keys))
        return _json(answer_body(samples))

    async def _progress(self, _: web.Request) -> web.Response:
        await asyncio.wrap_future(self._requests.turn())
        moment = await asyncio.to_thread(self._engine.progress)
        return _json({"loads": [{"timestamp": moment}]})
