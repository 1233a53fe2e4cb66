"""Served models that keep their weights, and their answers: a judge, for example."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import DriftError, EngineError, RequestError
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.sampler import RequestParams
from hybridrl.serving.engine_handle import Launch
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.plan import ModelPlan
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.sharding.manager_client import Answer
from hybridrl.workers.sharding.publishing import update_with_tries

VERSION = 0
"""Of weights that never change."""


class FrozenModel:
    """The server of one frozen model, and engines of it that ranks lend.

    New engines read its folder again. Those of ranks sleep while the trainer computes.
    """

    def __init__(
        self, config: ExperimentConfig, plan: ModelPlan, launch: Launch, *, key: str
    ) -> None:
        """Start nothing yet.

        Args:
            key: that engines of ranks require.
        """
        self._name = plan.model
        self._config = config
        self._max_context_tokens = max_context_tokens(config, plan.model)
        self._folder = Path(str(config.serving.models[plan.model].path))
        self._vocab_size = read_architecture(self._folder).vocab_size
        self._server = RolloutServer(plan, launch, config=config.rollout)
        self._recovery = Recovery(
            self._server,
            start_timeout_s=config.rollout.start_timeout_s,
            health_timeout_s=config.serving.health_timeout_s,
            key=key,
        )
        self._lent: Sequence[str] = ()

    def start(self) -> None:
        """Start all engines, with the weights of the folder.

        Raises:
            StageError: an engine did not start.
        """
        self._server.start()
        update_with_tries(partial(self._server.update, self._folder, version=VERSION))

    def lend(self, urls: Sequence[str]) -> None:
        """Take these engines of ranks, in their order, in place of those that were lent before."""
        self._lent = urls
        self._recovery.forget_lost()

    def lost(self) -> tuple[int, ...]:
        """Return the engines of ranks that did not work since they were lent, by their order."""
        return self._recovery.lost()

    def ask(
        self, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Answer]:
        """Answer each context once; own engines that are lost meanwhile or before are replaced.

        Args:
            contexts: int64 [n] each.
            timeout_s: ``reward.timeout_s``, of all answers.

        Raises:
            DriftError: an engine has other weights than before.
        """
        pool = self._server.pool(
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
            version=VERSION,
        )
        with self._recovery.filling(pool, self._lent), self._recovery.monitor.watching():
            return asyncio.run(self._answer_all(pool, contexts, params, timeout_s=timeout_s))

    async def _answer_all(
        self,
        pool: EnginePool,
        contexts: Sequence[Tensor],
        params: RequestParams,
        *,
        timeout_s: float,
    ) -> list[Answer]:
        async def answer(context: Tensor) -> Answer:
            try:
                return await pool.sample(context, params, key=_key_of(context, self._config.seed))
            except DriftError:
                raise
            except RequestError as error:
                return f"{self._name} refused the request: {error}"
            except EngineError as error:
                return f"{self._name}: {error}"

        tasks = [asyncio.create_task(answer(each)) for each in contexts]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            raise errors[0]
        late = f"{self._name} did not answer within reward.timeout_s={timeout_s:g} s"
        return [task.result() if task.done() else late for task in tasks]

    def shutdown(self) -> None:
        """End all engines."""
        self._server.shutdown()


def _key_of(context: Tensor, seed: int) -> int:
    """Return the random stream of an answer: that of the run's seed and the context alone."""
    digest = hashlib.sha256(f"{seed} {context.tolist()}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
