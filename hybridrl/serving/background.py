"""Sampling beside the trainer, over many updates of the weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, asynccontextmanager, contextmanager

from hybridrl.batch import PromptBatch
from hybridrl.config.serving import OnUpdate
from hybridrl.errors import ServerDiedError
from hybridrl.loop_thread import LoopThread
from hybridrl.metrics import Max, Metrics, Sum, merge
from hybridrl.sampler import Program, SamplingParams, T
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.open_groups import OpenGroups
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.requests import PolicyRequests
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.prefixes import KnownPrefixes

_NONE_CUT: Mapping[OnUpdate, Metrics] = {
    "interrupt": {
        "rollout/interrupted_responses": Sum(0),
        "rollout/interrupted_tokens": Sum(0),
    },
    "abort": {"rollout/aborted_responses": Sum(0), "rollout/aborted_tokens": Sum(0)},
    "finish": {},
}
"""So that each step has them; the pool mentions only those that there were."""


class BackgroundSampling:
    """One pool of engines, and programs that sample with it over many versions of the weights.

    Between updates it does what a synchronous phase does: lost engines are replaced, hung ones are
    found, requests go through the router if there is one. ``updating`` closes that, brings all open
    requests to an end or to a token, and opens it again with the new weights. Programs notice
    nothing: their requests wait meanwhile.
    """

    def __init__(
        self,
        server: RolloutServer,
        pool: EnginePool,
        groups: OpenGroups,
        *,
        requests: PolicyRequests,
        recovery: Recovery,
        on_update: OnUpdate,
    ) -> None:
        """Sample nothing yet.

        Args:
            pool: without engines; the server's join it after each update.
            requests: opens the way to engines; a phase is the time between two updates.
            on_update: whether open responses end before weights are loaded, or are interrupted,
                and whether they then keep their tokens.
        """
        pool.drops_interrupted = on_update == "abort"
        self._server = server
        self._pool = pool
        self._groups = groups
        self._requests = requests
        self._recovery = recovery
        self._on_update = on_update
        self._loop = LoopThread("background sampling")
        self._phase = ExitStack()
        self._is_ending = False
        self._metrics: Metrics = {}

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Let no request be open in the block, after which the engines have the new weights.

        After an error nothing is sampled until the next update succeeds.

        Args:
            version: of the weights that are loaded in the block.
        """
        begin = time.perf_counter()
        self._phase.close()
        yield
        with ExitStack() as opened:
            self._open(opened, version)
            self._phase = opened.pop_all()
        seconds: Metrics = {"time/update_engines_s": Max(time.perf_counter() - begin)}
        self._metrics = merge([self._metrics, seconds])

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, step: int
    ) -> tuple[Answered, Metrics]:
        """Admit prompts, and wait for a batch; see ``OpenGroups.exchange``."""
        try:
            answered = self._loop.run(self._groups.exchange(prompts, sampling, step=step))
        except CancelledError as error:
            raise ServerDiedError("the rollout manager ended before a batch was there") from error
        return answered, self._take_metrics()

    def run(self, program: Program[T]) -> T:
        """Run a program beside the open groups, with the weights of the last update."""
        return self._loop.run(program(self._pool))

    def end(self) -> None:
        """End all programs. Idempotent; before the end of the server."""
        self._is_ending = True
        self._loop.cancel_all()  # so no request is open
        self._phase.close()
        self._loop.end()

    def _take_metrics(self) -> Metrics:
        async def take() -> Metrics:
            return merge([self._pool.take_metrics(), self._groups.take_metrics()])

        metrics, self._metrics = self._metrics, {}
        return merge([metrics, _NONE_CUT[self._on_update], self._loop.run(take())])

    # -- between two updates ---------------------------------------------------------------------

    def _open(self, opened: ExitStack, version: int) -> None:
        phase = self._sending(version)
        self._loop.run(phase.__aenter__())
        opened.callback(lambda: self._loop.run(phase.__aexit__(None, None, None)))
        opened.enter_context(self._recovery.monitor.watching())
        opened.callback(lambda: self._loop.run(self._stop()))
        # First of all: an engine that comes while others stop waits for the next phase.
        opened.enter_context(self._recovery.filling(self._pool))

    @asynccontextmanager
    async def _sending(self, version: int) -> AsyncIterator[None]:
        engines = self._server.serving_engines()
        async with self._requests.open(self._pool, engines.values(), version=version) as ask:
            self._pool.ask = ask
            if self._pool.prefixes is not None:
                self._pool.prefixes = KnownPrefixes()  # new weights empty the caches
            for index, engine in engines.items():
                self._pool.readmit(index, engine, version=version)
            yield

    async def _stop(self) -> None:
        """Send no more requests, and wait until none is open."""
        engines = self._server.serving_engines()
        for index in engines:
            self._pool.suspend(index)
        await asyncio.sleep(0)  # a suspension takes effect in the next turn of the loop
        if self._on_update != "finish" and not self._is_ending:
            await self._requests.interrupt(engines.values())
        await self._pool.drained()
