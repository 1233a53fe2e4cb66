"""A served model that keeps the weights of its folder, and its answers: a judge, for example."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.sampler import RequestParams
from hybridrl.serving.answers import Answer, answer_all
from hybridrl.serving.engine_handle import Launch
from hybridrl.serving.plan import ServerPlan
from hybridrl.serving.rank_engines import RankEngines
from hybridrl.serving.recovery import Recovery, watch_engines
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.sharding.publishing import update_with_tries

_VERSION = 0
"""Of weights that never change."""


class FrozenModel:
    """The server of one frozen model, and engines of it that ranks lend.

    New engines read its folder again. Those of ranks sleep while the trainer computes.
    """

    def __init__(
        self, config: ExperimentConfig, plan: ServerPlan, launch: Launch, *, key: str
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
        self._recovery = Recovery(self._server, start_timeout_s=config.rollout.start_timeout_s)
        self._monitor = watch_engines(self._server, self._recovery, config.serving)
        self._rank_engines = RankEngines(
            key=key,
            first_index=self._server.num_engines,
            health_timeout_s=config.serving.health_timeout_s,
        )
        self._lent: Sequence[str] = ()

    def start(self) -> None:
        """Start all engines, with the weights of the folder.

        Raises:
            StageError: an engine did not start.
        """
        self._server.start()
        update_with_tries(partial(self._server.update, self._folder, version=_VERSION))

    def lend(self, urls: Sequence[str]) -> None:
        """Take these engines of ranks, in their order, in place of those that were lent before."""
        self._lent = urls
        self._rank_engines.forget_lost()

    def lost(self) -> tuple[int, ...]:
        """Return the engines of ranks that did not work since they were lent, by their order."""
        return self._rank_engines.lost()

    def ask(
        self, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Answer]:
        """Answer each context once; own engines that are lost meanwhile or before are replaced."""
        pool = self._server.pool(
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
            version=_VERSION,
        )
        with (
            self._recovery.filling(pool),
            self._monitor.watching(),
            self._rank_engines.joining(pool, self._lent),
        ):
            return asyncio.run(
                answer_all(
                    pool,
                    contexts,
                    params,
                    model=self._name,
                    seed=self._config.seed,
                    timeout_s=timeout_s,
                )
            )

    def shutdown(self) -> None:
        """End all engines."""
        self._monitor.end()
        self._rank_engines.end()
        self._recovery.end()
        self._server.shutdown()
