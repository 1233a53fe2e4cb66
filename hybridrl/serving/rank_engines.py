"""Engines that the ranks lead, while they are lent to the manager: for one rollout phase each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from hybridrl.errors import DriftError, PhaseError, RequestError
from hybridrl.metrics import Metrics
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import SamplingEngine, answered
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.health import HealthMonitor, Losses
from hybridrl.workers.rollout.sample_messages import (
    DRIFTED,
    SAMPLE_ROUTE,
    read_answer,
    request_body,
)
from hybridrl.workers.rollout.sglang.client import ServerClient, ServerError, assume_alive

_LEAST_SERVER_FAULT = 500


class RankEngine:
    """A ``SamplingEngine`` over HTTP. Its rank moves it along the life cycle, and nobody else."""

    def __init__(self, url: str, *, key: str) -> None:
        """Connect when first used.

        Args:
            url: of its server, or of the listener of its rank.
            key: of all engines that the ranks lend.
        """
        self.url = url
        self._client = ServerClient(
            url, name=f"the engine of a rank at {url}", require_alive=assume_alive, key=key
        )
        self._is_lost = False

    def address(self) -> Future[str | None]:
        """Return None: its rank answers requests."""
        return answered(None)

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Sample several continuations of one context; for an engine in the process of its rank."""
        return self._client.start(self._sample(request_body(token_ids, params, keys)))

    async def _sample(self, body: dict[str, Any]) -> list[Sample]:
        try:
            answer = await self._client.request(SAMPLE_ROUTE, body, timeout_s=None)
        except ServerError as error:
            if error.status == DRIFTED:
                raise DriftError(error.text) from error
            if error.status < _LEAST_SERVER_FAULT:
                raise RequestError(error.text) from error
            raise
        return read_answer(answer)

    def probe(self) -> Future[object]:
        """Return how far the engine is."""
        return self._client.start(self._client.loads())

    def is_alive(self) -> bool:
        """Whether it was not lost: no process of another machine can be looked at."""
        return not self._is_lost

    def signal(self, number: int) -> NoReturn:
        """Refuse: the configuration allows no such fault here."""
        raise PhaseError(f"signal {number} was not sent: the engine belongs to a rank: {self.url}")

    def cut(self) -> NoReturn:
        """Refuse likewise."""
        raise PhaseError(f"nothing was cut: the engine belongs to a rank: {self.url}")

    def lose(self) -> None:
        """Take it for lost: its rank restarts it after the phase."""
        self._is_lost = True

    def disconnect(self) -> None:
        """Close all connections."""
        self._client.close()


class RankEngines:
    """The engines of all ranks, as the manager has them. Those of one phase at a time."""

    def __init__(self, *, key: str, first_index: int, health_timeout_s: float) -> None:
        """Have no engine yet.

        Args:
            key: that all of them require.
            first_index: of the first one in a pool; the manager's own engines come before.
            health_timeout_s: seconds within which an engine must get on.
        """
        self._key = key
        self._first_index = first_index
        self._serving: dict[int, RankEngine] = {}
        self._lost: set[int] = set()
        self._losses = Losses("ranks")
        self._pool: EnginePool | None = None
        self._monitor = HealthMonitor(self.serving, self._drop, timeout_s=health_timeout_s)

    @contextmanager
    def joining(self, pool: EnginePool, urls: Sequence[str]) -> Iterator[None]:
        """Let these engines sample with a pool in the block. None is asked after it.

        Args:
            pool: whose own engines are replaced already if they are lost.
            urls: of the engines, by their order among the engines of the ranks.
        """
        if not urls:
            yield
            return
        self._serving = {
            self._first_index + number: RankEngine(url, key=self._key)
            for number, url in enumerate(urls)
        }
        self._pool, replace = pool, pool.on_lost
        pool.on_lost = partial(self._note_lost, replace)
        for index, engine in self._serving.items():
            pool.join(index, engine)
        self._losses.note_ready(self._serving)
        try:
            with self._monitor.watching():
                yield
        finally:
            lent, self._serving, self._pool = self._serving, {}, None
            for engine in lent.values():
                engine.disconnect()

    def serving(self) -> Mapping[int, RankEngine]:
        """Return those that answer requests, by index in a pool. Any thread."""
        return {index: each for index, each in self._serving.items() if each.is_alive()}

    def lost(self) -> tuple[int, ...]:
        """Return the engines that were lost since they joined, by their order among them."""
        return tuple(sorted(self._lost))

    def forget_lost(self) -> None:
        """Others are lent, or the same ones again, that their ranks have seen to."""
        self._lost.clear()

    def take_metrics(self) -> Metrics:
        """Return lost engines, and those that are back, since the last call; reset them."""
        return self._losses.take_metrics()

    def _drop(self, index: int, engine: RankEngine, reason: str) -> None:
        if self._pool is not None:
            self._pool.drop(index, engine, reason)

    def _note_lost(
        self,
        replace: Callable[[int, SamplingEngine, str], bool],
        index: int,
        engine: SamplingEngine,
        reason: str,
    ) -> bool:
        """Note an engine that failed; return whether another one takes its place in this phase."""
        if not isinstance(engine, RankEngine):
            return replace(index, engine, reason)
        engine.lose()
        self._lost.add(index - self._first_index)
        self._losses.note_lost([index], reason)
        return False
