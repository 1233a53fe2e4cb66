"""Faults on purpose (``serving.faults``): what a run does when an engine dies, hangs or errs.

Without faults in the configuration no request passes through this module.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.serving import FaultConfig, FaultKind
from hybridrl.errors import EngineError
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import SamplingEngine
from hybridrl.serving.engine_pool import AskGroup

log = logging.getLogger(__name__)

_SIGNALS: Mapping[FaultKind, int] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_GARBAGE: Mapping[FaultKind, Callable[[Sample], Sample]] = {
    "tokens": lambda sample: replace(sample, token_ids=sample.token_ids - 2**20),
    "logprobs": lambda sample: replace(sample, logprobs=sample.logprobs * torch.nan),
    "version": lambda sample: replace(sample, weight_version=sample.weight_version + 1000),
}


class FaultPlan:
    """Makes faults at drawn requests of some phases."""

    def __init__(self, faults: Mapping[str, FaultConfig], *, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._phase = 0
        self._num_requests = 0
        self._due: dict[int, list[FaultKind]] = {}
        self._cut: set[SamplingEngine] = set()

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
        self,
        ask: AskGroup,
        engine: SamplingEngine,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        keys: Sequence[int],
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
        for kind in _SIGNALS.keys() & kinds:  # before the request: a short one may be answered
            engine.signal(_SIGNALS[kind])
        if "cut" in kinds:
            engine.cut()
            self._cut.add(engine)
        samples = await self._pass_on(ask(engine, token_ids, params, keys), engine)
        for kind in _GARBAGE.keys() & kinds:
            samples = [_GARBAGE[kind](sample) for sample in samples]
        return samples

    async def _pass_on(
        self, asking: Coroutine[Any, Any, list[Sample]], engine: SamplingEngine
    ) -> list[Sample]:
        """Return an answer, unless the engine was cut off, by this request or meanwhile."""
        answers = await asyncio.gather(asking, return_exceptions=True)
        answer: list[Sample] | BaseException = answers[0]
        if engine in self._cut:
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, BaseException):
            raise answer
        return answer
