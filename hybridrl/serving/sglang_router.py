"""Requests through sglang-router, which chooses the server of each (``serving.router=sglang``).

Admission, versions and repeats stay with the ``EnginePool``: it counts a request on an engine with
room, whichever server answers, so the router gets as many requests as its servers have slots.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any

import aiohttp

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    PhaseError,
    RequestError,
    RouterError,
    ServerDiedError,
)
from hybridrl.images import ImageSettings
from hybridrl.metrics import Mean, Metrics, Sum, merge
from hybridrl.sampler import Sample, SampleRequest, T
from hybridrl.serving.engine_handle import AskGroup, EngineHandle
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.sglang_router_process import RouterProcess
from hybridrl.workers.rollout.event_loop import ProgramCall
from hybridrl.workers.rollout.sglang.client import Body, ConnectionLostError, Endpoint, RefusedError
from hybridrl.workers.rollout.sglang.sampling import (
    BELOW_ADAPTERS,
    HttpSampler,
    ServedModel,
    single_bodies,
)

log = logging.getLogger(__name__)

_GENERATE = "/generate"
_SEES_DEATH_S = 3.0
"""Seconds until a process whose connections broke is known to be gone."""

_POLL_S = 0.05


class PolicyRouter(Endpoint):
    """The router and its servers, as one server that answers a program.

    The router may die: it is started again, gets its servers back, and open requests are repeated.
    """

    most_restarts = 3
    """Within one rollout phase."""

    def __init__(self, config: ExperimentConfig, *, vocab_size: int, key: str) -> None:
        """Start nothing yet; ``key`` is that of the router and all its servers."""
        super().__init__("the router", name="the router", key=key)
        self._config = config
        self._vocab_size = vocab_size
        self._process: RouterProcess | None = None
        self._servers: dict[EngineHandle, Endpoint] = {}
        """Engines that serve in this phase."""
        self._shown: list[str] = []
        """Addresses that the router has."""
        self._lost: asyncio.Future[None]
        """Done when the next engine is lost."""
        self._sampler: HttpSampler | None = None
        self._changing = threading.Lock()
        self._num_restarts = self._num_answered = self._num_unanswered = 0
        self._seconds = Mean(0.0, 0.0)
        self._metrics: Metrics = {}
        self._monitor = HealthMonitor(
            lambda: {} if self._process is None else {0: self._process},
            _kill_hung,
            timeout_s=config.serving.health_timeout_s,
        )

    def start(self) -> None:
        """Start the router and wait until it answers; see ``RouterProcess``."""
        # The router limits a request's total time; no request must reach that.
        longest_s = int(self._config.cluster.call_timeout_s) + 60
        self._process = RouterProcess(
            key=self.key,
            timeout_s=self._config.rollout.start_timeout_s,
            arguments={"request_timeout_secs": longest_s},
        )
        self._shown = []
        log.info("the router answers: url=%s", self._process.url)

    @property
    def process(self) -> RouterProcess:
        """The router at present."""
        if self._process is None:
            raise PhaseError("the router was not started; call start")
        return self._process

    # -- a program -------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(
        self, engines: Collection[EngineHandle], *, version: int
    ) -> AsyncIterator[AskGroup]:
        """Open the way to engines; a RouterError if the router ends again and again."""
        self._servers = {}
        self._lost = asyncio.get_running_loop().create_future()
        await asyncio.gather(*map(self._know, engines), return_exceptions=True)  # or it is gone
        await asyncio.to_thread(self._show)
        sampler = connect(self._config, self, self._vocab_size, images=None, version=version)
        with self._monitor.watching():
            async with sampler:
                self._sampler = sampler
                yield partial(self._ask, sampler)
        self._sampler = None
        self._metrics = merge([self._metrics, sampler.take_metrics()])

    async def _ask(
        self, sampler: HttpSampler, engine: EngineHandle, request: SampleRequest
    ) -> list[Sample]:
        """Send a request; if it fails, that is no reason to lose the engine that it counts on."""
        if engine not in self._servers:
            await self._know(engine)
            await asyncio.to_thread(self._show)
        try:
            return await sampler.answer(request)
        except (RequestError, DriftError):
            raise
        except (EngineError, DeadlineError) as error:
            raise RouterError(f"a request through sglang-router failed: {error}") from error

    async def _know(self, engine: EngineHandle) -> None:
        url = await asyncio.wrap_future(engine.address())
        if url is None:
            raise EngineError("a rollout engine behind the router has no server")
        self._servers[engine] = Endpoint(url, name=f"SGLang at {url}", key=self.key)

    def interrupt(self) -> None:
        """Let open requests return with the tokens that they have. In the program's loop."""
        if self._sampler is not None:
            self._sampler.interrupt()

    # -- its servers -----------------------------------------------------------------------------

    def _living(self) -> list[Endpoint]:
        """Return the servers of this phase whose processes are there."""
        return [endpoint for engine, endpoint in self._servers.items() if engine.is_alive()]

    def leave_out(self, engine: EngineHandle) -> None:
        """Send a lost engine nothing more; it may have any open request, so all are sent again."""
        if self._servers.pop(engine, None) is not None:
            lost, self._lost = self._lost, asyncio.get_running_loop().create_future()
            lost.set_result(None)

    def hide(self) -> None:
        """Send no request to any server, because they pause. Idempotent."""
        self._servers = {}
        self._show()

    def _show(self) -> None:
        """Let the router have exactly the living servers; one that dies meanwhile is replaced."""
        with self._changing:
            reason = "it ended between two calls"
            while True:
                urls = [endpoint.base_url for endpoint in self._living()]
                try:
                    if self.process.is_alive():
                        if urls != self._shown:
                            self.process.show(urls)
                            self._shown = urls
                        return
                except (DeadlineError, ServerDiedError, ConnectionLostError) as error:  # or hangs
                    reason = str(error)
                self.process.end()
                if self._num_restarts == self.most_restarts:
                    raise RouterError(
                        f"sglang-router ended {1 + self.most_restarts} times in one rollout phase, "
                        f"the last time: {reason}; set serving.router=none, which needs none"
                    )
                log.warning("the router is started again: reason=%s", reason)
                self._num_restarts += 1
                self.start()

    # -- requests --------------------------------------------------------------------------------

    async def request(self, path: str, body: Body | None = None, **given: Any) -> Any:  # noqa: ANN401
        """Send requests for tokens to the router, one a response, and others to all servers."""
        if path != _GENERATE or body is None:
            calls = [server.request(path, body, **given) for server in self._living()]
            # One that is gone keeps none of the others from its request.
            return await asyncio.gather(*calls, return_exceptions=True)
        session = given.get("session")
        tasks = [
            asyncio.ensure_future(self._generate(each, session)) for each in single_bodies(body)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def loads(self, session: aiohttp.ClientSession | None = None) -> list[Body]:
        """Return the loads of all servers; each has a monitor besides."""
        loads = [server.loads(session) for server in self._living()]
        return list(chain.from_iterable(await asyncio.gather(*loads)))

    async def _generate(self, body: Body, session: aiohttp.ClientSession | None) -> Any:  # noqa: ANN401 - JSON
        """Send one request to the server that the router chooses.

        A server that is gone leaves the router, and the request goes to another one; after some
        seconds of failures, by servers or routers that live, it fails. The caller limits the wait:
        see ``while_it_works``.
        """
        begin, give_up_s = time.monotonic(), None
        while True:
            process = self.process
            try:
                asking = process.client.request(_GENERATE, body, timeout_s=None, session=session)
                answer = await self._unless_lost(asking)
            except _LostBehindRouterError:
                await asyncio.to_thread(self._show)
                raise  # it may still compute: the next try needs another name
            except (ServerDiedError, ConnectionLostError, RefusedError) as error:
                now_s = time.monotonic()
                give_up_s = give_up_s or now_s + _SEES_DEATH_S
                is_refused = isinstance(error, RefusedError) and not error.is_servers_fault
                if is_refused or now_s > give_up_s:
                    self._num_unanswered += 1
                    raise
                await asyncio.to_thread(self._show)
                if self.process is not process:
                    give_up_s = None
                await asyncio.sleep(_POLL_S)
            else:
                self._num_answered += 1
                self._seconds += Mean(time.monotonic() - begin, 1.0)
                return answer

    async def _unless_lost(self, asking: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer, or for the loss of a server that may have had to give it."""
        lost, answer = self._lost, asyncio.ensure_future(asking)
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        raise _LostBehindRouterError

    def take_metrics(self) -> Metrics:
        """Describe the time since the last call under declared names. Call it in each phase."""
        metrics: Metrics = {
            "rollout/router_restarts": Sum(self._num_restarts),
            "rollout/routed_requests": Sum(self._num_answered + self._num_unanswered),
            "rollout/unanswered_routed_requests": Sum(self._num_unanswered),
            "time/routed_request_s": self._seconds,
        }
        metrics = merge([self._metrics, metrics])
        self._num_restarts = self._num_answered = self._num_unanswered = 0
        self._seconds, self._metrics = Mean(0.0, 0.0), {}
        return metrics

    def end(self) -> None:
        """Kill the router. Idempotent."""
        if self._process is not None:
            self._process.end()


class _LostBehindRouterError(RefusedError):
    """A server left while it may have had the request."""

    def __init__(self) -> None:
        super().__init__(_GENERATE, 500, "a server behind the router is lost")


def connect(
    config: ExperimentConfig,
    server: Endpoint,
    vocab_size: int,
    *,
    images: ImageSettings | None,
    version: int,
) -> HttpSampler:
    """Return the sampler of a server of the policy, to be entered in a program's loop."""
    model = ServedModel(
        max_context_tokens=config.max_context_tokens,
        vocab_size=vocab_size,
        version=version,
        weight_version=BELOW_ADAPTERS if config.lora.sends_adapters else None,
        names_adapter=config.lora.sends_adapters,
        images=images,
    )
    timeout_s = config.rollout.request_timeout_s
    return HttpSampler(server, model, ProgramCall(), timeout_s=timeout_s)


def _kill_hung(_: int, process: RouterProcess, reason: str) -> None:
    """Kill a router that does not answer: its requests fail, and another one is started."""
    if process.is_alive():
        log.warning("the router is killed: reason=%s", reason)
        process.process.end()
