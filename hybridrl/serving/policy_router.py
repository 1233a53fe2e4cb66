"""Requests to SGLang's servers through the router of their model, in the loop of a program."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from torch import Tensor

from hybridrl.config.architecture import read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Metrics, merge
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import SamplingEngine
from hybridrl.serving.engine_pool import AskGroup
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.router import RouterProcess
from hybridrl.serving.router_front import RouterFront
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sglang.answers import ServedModel
from hybridrl.workers.rollout.sglang.client import Body, Endpoint
from hybridrl.workers.rollout.sglang.engine_choice import EngineChoice
from hybridrl.workers.rollout.sglang.sampling import ServerSampler

log = logging.getLogger(__name__)

_GENERATE = "/generate"


class RoutedEndpoint(Endpoint):
    """One server: requests for tokens go through the router, others go to it directly.

    The router passes one set of parameters a request, so a batch is taken apart.
    """

    def __init__(self, front: RouterFront, url: str) -> None:
        """Connect when first used."""
        super().__init__(url, name=f"SGLang at {url}", key=front.key)
        self._front = front

    async def request(
        self,
        path: str,
        body: Body | None = None,
        *,
        timeout_s: float | None,
        method: str = "POST",
        session: aiohttp.ClientSession | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """Do one call; see ``Endpoint.request``."""
        if path != _GENERATE or body is None:
            return await super().request(
                path, body, timeout_s=timeout_s, method=method, session=session, headers=headers
            )
        tasks = [
            asyncio.ensure_future(self._front.generate(each, url=self.base_url, session=session))
            for each in single_bodies(body)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def single_bodies(body: Body) -> list[Body]:
    """Take a request for several responses apart; one for a single response stays as it is."""
    if "rid" not in body:
        return [body]
    return [
        {**body, "input_ids": tokens, "sampling_params": params, "rid": name}
        for tokens, params, name in zip(
            body["input_ids"], body["sampling_params"], body["rid"], strict=True
        )
    ]


class Routes:
    """The ways to engines through the router, for one program: opened when first used."""

    def __init__(self, open_sampler: Callable[[str], Awaitable[ServerSampler]]) -> None:
        """Open none yet.

        Args:
            open_sampler: makes the sampler of the server at an address, and connects it.
        """
        self.samplers: list[ServerSampler] = []
        self._open_sampler = open_sampler
        self._routes: dict[SamplingEngine, asyncio.Task[ServerSampler]] = {}
        self._is_interrupted = False

    async def ask(
        self,
        engine: SamplingEngine,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        keys: Sequence[int],
    ) -> list[Sample]:
        """Send a request to an engine; an ``AskGroup``."""
        if engine not in self._routes:
            self._routes[engine] = asyncio.ensure_future(self._open(engine))
        sampler = await asyncio.shield(self._routes[engine])  # others wait for it, too
        return await sampler.sample_group(token_ids, params, keys=keys)

    async def _open(self, engine: SamplingEngine) -> ServerSampler:
        sampler = await self._open_sampler(await address_of(engine))
        self.samplers.append(sampler)
        if self._is_interrupted:  # meanwhile: no request was sent
            sampler.interrupt()
        return sampler

    def interrupt(self) -> None:
        """Let open requests return with the tokens that they have, and later ones with none."""
        self._is_interrupted = True
        for sampler in self.samplers:
            sampler.interrupt()


class PolicyRouter:
    """The router of the policy, and the programs that sample through it."""

    def __init__(self, config: ExperimentConfig, model_folder: Path, key: str) -> None:
        """Start nothing yet.

        Args:
            key: of the router and its servers; made for this run.
        """
        self.key = key
        self._config = config
        self._vocab_size = read_architecture(model_folder).vocab_size
        self._front: RouterFront | None = None
        self._monitor: HealthMonitor[RouterProcess] | None = None
        self._routes: Routes | None = None
        """Of the program that is open."""
        self._metrics: Metrics = {}

    def start(self) -> None:
        """Start the router; see ``RouterProcess``."""
        rollout = self._config.rollout
        self._front = RouterFront(
            key=self.key,
            start_timeout_s=rollout.start_timeout_s,
            call_timeout_s=self._config.cluster.call_timeout_s,
        )
        self._monitor = HealthMonitor(
            lambda: {0: self.front.process},
            _kill_hung,
            timeout_s=self._config.serving.health_timeout_s,
        )

    def hide(self) -> None:
        """Send no request to any engine, because they pause. Idempotent."""
        if self._front is not None:
            self._front.remove_all()

    @asynccontextmanager
    async def open(
        self, engines: Collection[SamplingEngine], *, version: int
    ) -> AsyncIterator[AskGroup]:
        """Open the way to engines for one program; engines that come later are added.

        Args:
            engines: that admit requests.
            version: of the weights that all must have.

        Raises:
            PhaseError: the router was not started.
            DriftError: an engine has other weights.
            EngineError: the router is gone, and does not start again.
        """
        front = self.front
        answers = await asyncio.gather(*map(address_of, engines), return_exceptions=True)
        urls = [url for url in answers if isinstance(url, str)]
        await asyncio.to_thread(front.serve, urls, version=version)
        async with AsyncExitStack() as stack:
            if self._monitor is not None:
                stack.enter_context(self._monitor.watching())

            async def open_sampler(url: str) -> ServerSampler:
                await asyncio.to_thread(front.add, url)
                return await stack.enter_async_context(self._sampler(front, url, version))

            routes = Routes(open_sampler)
            self._routes = routes
            yield routes.ask
        self._metrics = merge([sampler.metrics() for sampler in routes.samplers])

    def interrupt(self) -> None:
        """Let open requests return with the tokens that they have. In the program's loop."""
        if self._routes is not None:
            self._routes.interrupt()

    def take_metrics(self) -> Metrics:
        """Describe the last program under declared names."""
        metrics, self._metrics = self._metrics, {}
        return merge([metrics, self.front.take_metrics()])

    def end(self) -> None:
        """Kill the router. Idempotent."""
        if self._monitor is not None:
            self._monitor.end()
        if self._front is not None:
            self._front.end()

    def _sampler(self, front: RouterFront, url: str, version: int) -> ServerSampler:
        model = ServedModel(
            max_context_tokens=self._config.max_row_tokens,
            vocab_size=self._vocab_size,
            version=version,
        )
        return ServerSampler(
            EngineChoice(RoutedEndpoint(front, url)),
            model,
            ProgramCall(),
            timeout_s=self._config.rollout.request_timeout_s,
        )

    @property
    def front(self) -> RouterFront:
        """The router while it serves."""
        if self._front is None:
            raise PhaseError("the router was not started; call start")
        return self._front


def _kill_hung(_: int, router: RouterProcess, reason: str) -> None:
    """Kill a router that does not answer: its requests fail, and another one is started."""
    if router.is_alive():
        log.warning("the router is killed: reason=%s", reason)
        router.kill()


async def address_of(engine: SamplingEngine) -> str:
    """Return the address of an engine's server.

    Raises:
        EngineError: it has none; or its process is gone.
    """
    url = await asyncio.wrap_future(engine.address())
    if url is None:
        raise EngineError("a rollout engine behind the router has no server")
    return url
