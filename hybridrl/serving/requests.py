"""The way of requests to the engines of the policy, and faults on purpose on that way."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import FaultConfig, FaultKind
from hybridrl.errors import EngineError
from hybridrl.images import ImageSettings
from hybridrl.metrics import Metrics, merge
from hybridrl.sampler import Sample, SampleRequest
from hybridrl.serving.engine_handle import AskGroup, EngineHandle, ask_process
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.sglang_router import PolicyRouter, connect
from hybridrl.workers.rollout.sglang.client import Endpoint
from hybridrl.workers.rollout.sglang.sampling import HttpSampler
from hybridrl.workers.sharding.managed_engine import ManagedEngine

log = logging.getLogger(__name__)


class PolicyRequests:
    """Opens the way between two updates: straight to the engines, or through the router.

    All requests to a server leave this process: those with the same context share its prefill.
    """

    def __init__(
        self, config: ExperimentConfig, *, vocab_size: int, images: ImageSettings | None, key: str
    ) -> None:
        """Start nothing yet; ``key`` is that of the engines' servers, and of the router.

        ``images`` says how the model cuts them; None: it sees none.
        """
        is_routed = config.serving.router == "sglang"
        self.router = PolicyRouter(config, vocab_size=vocab_size, key=key) if is_routed else None
        self._faults = FaultPlan(config.serving.faults, seed=config.seed)
        self._config, self._vocab_size, self._key = config, vocab_size, key
        self._images = images
        self._version = -1
        self._opened = AsyncExitStack()
        self._ways: dict[EngineHandle, asyncio.Task[HttpSampler | None]] = {}
        self._samplers: list[HttpSampler] = []
        self._is_interrupted = False
        self._metrics: Metrics = {}

    @asynccontextmanager
    async def open(
        self, pool: EnginePool, engines: Collection[EngineHandle], *, version: int
    ) -> AsyncIterator[AskGroup]:
        """Open the way of a pool to these engines; see ``PolicyRouter.open``."""
        if self.router is not None:
            pool.on_left = self.router.leave_out
            async with self.router.open(engines, version=version) as ask:
                yield self._faults.spoil(ask)
            return
        self._version = version
        self._ways, self._samplers, self._is_interrupted = {}, [], False
        async with AsyncExitStack() as self._opened:
            yield self.begin_phase()
        self._note_metrics()

    def begin_phase(self) -> AskGroup:
        """Return how to ask engines from here on, on the way that is open."""
        self._note_metrics()
        return self._faults.spoil(self._ask if self._config.asks_servers else ask_process)

    def _note_metrics(self) -> None:
        new = [each.take_metrics() for each in self._samplers]
        self._metrics = merge([self._metrics, *new])

    async def _ask(self, engine: EngineHandle, request: SampleRequest) -> list[Sample]:
        if engine not in self._ways:
            self._ways[engine] = asyncio.ensure_future(self._connect(engine))
        sampler = await asyncio.shield(self._ways[engine])  # others wait for it, too
        if sampler is None:
            return await ask_process(engine, request)
        return await sampler.answer(request)

    async def _connect(self, engine: EngineHandle) -> HttpSampler | None:
        url = await asyncio.wrap_future(engine.address())
        if url is None:
            return None
        server = Endpoint(url, name=f"SGLang at {url}", key=self._key)
        sampler = connect(
            self._config, server, self._vocab_size, images=self._images, version=self._version
        )
        await self._opened.enter_async_context(sampler)
        self._samplers.append(sampler)
        if self._is_interrupted:  # meanwhile: no request was sent
            sampler.interrupt()
        return sampler

    async def interrupt(self, engines: Collection[EngineHandle]) -> None:
        """Let open requests return with the tokens that they have."""
        if self.router is not None:
            self.router.interrupt()
            return
        self._is_interrupted = True
        for sampler in self._samplers:
            sampler.interrupt()
        calls = [asyncio.wrap_future(engine.act(ManagedEngine.interrupt)) for engine in engines]
        await asyncio.gather(*calls, return_exceptions=True)

    def take_metrics(self) -> Metrics:
        """Describe the programs since the last call under declared names."""
        metrics, self._metrics = self._metrics, {}
        return metrics if self.router is None else merge([metrics, self.router.take_metrics()])


_OF_PROCESSES: Collection[FaultKind] = ("kill", "stop", "cut")

_GARBAGE: Mapping[FaultKind, Callable[[Sample], Sample]] = {
    "tokens": lambda sample: replace(sample, token_ids=sample.token_ids - 2**20),
    "logprobs": lambda sample: replace(sample, logprobs=sample.logprobs * torch.nan),
    "version": lambda sample: replace(sample, weight_version=sample.weight_version + 1000),
}


class FaultPlan:
    """Makes faults on purpose (``serving.faults``) at drawn requests of some phases."""

    def __init__(self, faults: Mapping[str, FaultConfig], *, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._phase = 0
        self._num_requests = 0
        self._due: dict[int, list[FaultKind]] = {}
        self._cut: set[EngineHandle] = set()

    def spoil(self, ask: AskGroup) -> AskGroup:
        """Begin a phase: draw its faults, and return how to ask engines in it."""
        if not self._faults:
            return ask
        self._phase += 1
        self._num_requests = 0
        self._due = {}
        for name, fault in self._faults.items():
            if self._phase % fault.every_num_phases == 0:
                number = Random(f"{self._seed} {name} {self._phase}").randrange(
                    fault.within_requests
                )
                self._due.setdefault(number, []).append(fault.kind)
        return partial(self._ask, ask)

    async def _ask(
        self, ask: AskGroup, engine: EngineHandle, request: SampleRequest
    ) -> list[Sample]:
        """Ask an engine, and make the faults that are due."""
        kinds = self._due.pop(self._num_requests, [])
        self._num_requests += 1
        for kind in kinds:
            log.warning("a fault on purpose: kind=%s phase=%d", kind, self._phase)
        if "kill_manager" in kinds:
            os.kill(os.getpid(), signal.SIGKILL)
        if "error" in kinds:
            raise EngineError("/generate was answered with status 500: a fault on purpose")
        for kind in kinds:
            if kind in _OF_PROCESSES:  # before the request: a short one may be answered
                engine.harm(kind)
            if kind == "cut":
                self._cut.add(engine)
        samples = await self._pass_on(ask(engine, request), engine)
        for kind in _GARBAGE.keys() & kinds:
            samples = [_GARBAGE[kind](sample) for sample in samples]
        return samples

    async def _pass_on(
        self, asking: Coroutine[Any, Any, list[Sample]], engine: EngineHandle
    ) -> list[Sample]:
        """Return an answer, unless the engine was cut off, by this request or meanwhile."""
        answers = await asyncio.gather(asking, return_exceptions=True)
        answer: list[Sample] | BaseException = answers[0]
        if engine in self._cut:
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, BaseException):
            raise answer
        return answer
