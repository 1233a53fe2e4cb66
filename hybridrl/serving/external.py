"""A frozen model whose servers run elsewhere: compared at the start, asked, and never ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from torch import Tensor

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import DeadlineError, EngineError, ExternalEngineError, first_of
from hybridrl.sampler import RequestParams
from hybridrl.serving.engine_handle import SamplingEngine
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.external_engine import VERSION, ExternalEngine
from hybridrl.serving.frozen import answer_all
from hybridrl.serving.launching import ServerKeys
from hybridrl.workers.rollout.sglang.comparison import expect_server
from hybridrl.workers.sharding.manager_client import Answer

log = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_TRIES = 3
"""Comparisons with a server that was lost, in one call."""

_WAIT_S = 1.0
"""Before each of them."""


class ExternalModel:
    """The servers of one frozen model. A lost one gets no requests until it answers again."""

    def __init__(self, config: ExperimentConfig, model: str, *, keys: ServerKeys) -> None:
        """Ask nothing yet; see ``expect_server``."""
        self._name = model
        self._config = config
        self._expected = expect_server(config, model)
        self._engines = [
            ExternalEngine(url, expected=self._expected, config=config.rollout, key=keys.of(model))
            for url in config.serving.models[model].urls
        ]
        self._lost: set[int] = set()

    def start(self) -> None:
        """Compare all servers with what is needed, all at once.

        With ``rollout.verify_weights=always`` their weights with each other, too.

        Raises:
            ExternalEngineError: names all differences of all servers.
        """
        self._all([engine.build() for engine in self._engines])
        if self._config.rollout.verify_weights == "always":
            self._require_equal_weights()
        urls = [engine.url for engine in self._engines]
        log.info("servers elsewhere answer as needed: model=%s urls=%s", self._name, urls)

    def ask(
        self, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Answer]:
        """Answer each context once; requests of a lost server go to the others.

        For arguments see ``answer_all``.

        Raises:
            DriftError: the weights of a server are no longer those of the start.
        """
        rollout = self._config.rollout
        lost = sorted(self._lost)
        pool = EnginePool(
            {i: each for i, each in enumerate(self._engines) if i not in lost},
            num_slots=rollout.num_slots,
            max_context_tokens=self._expected.max_context_tokens,
            vocab_size=self._expected.vocab_size,
            version=VERSION,
        )

        async def answer() -> list[Answer]:
            returning = [asyncio.ensure_future(self._reconnect(pool, i)) for i in lost]

            def lose(index: int, handle: SamplingEngine, reason: str) -> bool:
                self._lost.add(index)
                returning.append(asyncio.ensure_future(self._reconnect(pool, index)))
                return True

            pool.on_lost = lose
            try:
                return await answer_all(
                    pool,
                    contexts,
                    params,
                    model=self._name,
                    seed=self._config.seed,
                    timeout_s=timeout_s,
                )
            finally:
                for task in returning:
                    task.cancel()

        for index in lost:
            pool.expect(index)
        return asyncio.run(answer())

    def shutdown(self) -> None:
        """Close the connections; the servers run on. Idempotent."""
        for engine in self._engines:
            engine.end()

    def _all(self, futures: Sequence[Future[T]]) -> list[T]:
        """Wait for all calls, each of which ends in bounded time."""
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise self._unusable(len(errors), "\n".join(str(error) for error in errors))
        return [future.result() for future in futures]

    def _require_equal_weights(self) -> None:
        first, *others = self._all([engine.checksums() for engine in self._engines])
        lines = []
        for engine, sums in zip(self._engines[1:], others, strict=True):
            names = sorted(n for n in first.keys() | sums.keys() if first.get(n) != sums.get(n))
            if names:
                lines.append(
                    f"{engine.url}: {len(names)} of its tensors are not those of "
                    f"{self._engines[0].url}: {first_of(names)}; start both with the same model "
                    "and tensor-parallel size"
                )
        if lines:
            raise self._unusable(len(lines), "\n".join(lines))

    def _unusable(self, count: int, lines: str) -> ExternalEngineError:
        return ExternalEngineError(
            f"{count} of {len(self._engines)} servers of {self._expected.key}.urls cannot be used:"
            f"\n{lines}"
        )

    async def _reconnect(self, pool: EnginePool, index: int) -> None:
        """Send requests to a lost server again if it comes back soon, and is the same as before."""
        reason = ""
        for _ in range(_NUM_TRIES):
            await asyncio.sleep(_WAIT_S)
            try:
                await asyncio.wrap_future(self._engines[index].build())
            except (EngineError, DeadlineError) as error:
                reason = str(error)
            else:
                self._lost.discard(index)
                pool.join(index, self._engines[index])
                return
        pool.give_up(index, reason)
