"""Which engine of its node a rank sends a request to: the least loaded, or one with the prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from hybridrl.errors import ServerDiedError
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.rollout.directory import EngineAddress, EngineDirectory
from hybridrl.workers.rollout.prefixes import STAY, KnownPrefixes, prefix_sums
from hybridrl.workers.rollout.sglang.client import Body, Endpoint

_POLL_S = 0.01


class ServingEngine:
    """An engine that serves the current program."""

    caches_contexts = True
    """Whether a context that was sent once is computed once."""

    def __init__(self, endpoint: Endpoint, index: int) -> None:
        """Prepare.

        Args:
            index: among the engines of the worker group.
        """
        self.index = index
        self.num_responses = 0
        """Sent to it by the program so far."""
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Of its server."""
        return self._endpoint.base_url

    async def open(self) -> AbstractAsyncContextManager[object]:
        """Connect in the current event loop; the caller closes what it gets."""
        self._session = self._endpoint.open_session()
        return self._session

    async def ask(self, path: str, body: Body, *, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Do one request; see ``Endpoint.request``."""
        return await self._endpoint.request(path, body, timeout_s=timeout_s, session=self._session)

    async def progress(self) -> object:
        """Return its load, which any token changes; not when it was written. See ``loads``."""
        return without_time(await self._endpoint.loads(self._session))


class EngineChoice:
    """The engines that one program may use; the first is the rank's own."""

    def __init__(
        self,
        own: Endpoint,
        *,
        directory: EngineDirectory | None = None,
        num_slots: int = 1,
        make_own: Callable[[Endpoint, int], ServingEngine] = ServingEngine,
    ) -> None:
        """Take over the engines of a rollout phase.

        Args:
            directory: the other engines; None if there are none.
            num_slots: responses that an engine decodes at the same time.
            make_own: makes the engine on this rank's server.
        """
        self._directory = directory
        self._engines = [make_own(own, 0 if directory is None else directory.own_index)]
        if directory is not None:
            directory.clear()
            self._engines += [
                ServingEngine(_foreign(other.index, other.address), other.index)
                for other in directory.others
            ]
        self._limit = num_slots + num_slots // 8  # enough to be queued when a slot becomes free
        self._turn = asyncio.Lock()
        self._prefixes = KnownPrefixes()
        self._connections = AsyncExitStack()
        self.is_open = False

    async def open(self) -> None:
        """Connect in the current event loop."""
        for engine in self._engines:
            await self._connections.enter_async_context(await engine.open())
        self.is_open = True

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self.is_open = False
        await self._connections.aclose()

    def metrics(self) -> Metrics:
        """Return the share of responses that other ranks' engines sampled."""
        if len(self._engines) == 1:
            return {}
        counts = [engine.num_responses for engine in self._engines]
        return {"rollout/foreign_response_fraction": Mean(sum(counts[1:]), sum(counts))}

    @asynccontextmanager
    async def lend(
        self, token_ids: Sequence[int], num_responses: int
    ) -> AsyncIterator[ServingEngine]:
        """Choose the engine of a request; count its responses as open in the block.

        Single responses wait here, in their order, while all engines are full: whichever is free
        first takes the next one. A group does not: it counts as open until its last response ends,
        when most of its slots have long been free.
        """
        if self._directory is None or len(self._engines) == 1:
            self._engines[0].num_responses += num_responses
            yield self._engines[0]
            return
        async with self._turn:
            while num_responses == 1 and min(self._loads()) >= self._limit:
                await asyncio.sleep(_POLL_S)
            engine = self._choose(token_ids)
            self._directory.count(engine.index, num_responses)
        engine.num_responses += num_responses
        try:
            yield engine
        finally:
            self._directory.count(engine.index, -num_responses)

    def remember(self, token_ids: Sequence[int], engine: ServingEngine) -> None:
        """Note that an engine has these tokens in its cache."""
        if len(self._engines) > 1:
            self._prefixes.add(prefix_sums(token_ids), self._engines.index(engine))

    def _choose(self, token_ids: Sequence[int]) -> ServingEngine:
        loads, sums_L = self._loads(), prefix_sums(token_ids)
        holder = self._prefixes.find(sums_L)
        usual, patience = (0, 0) if holder is None else (holder, STAY)
        least = min(range(len(loads)), key=loads.__getitem__)
        chosen = least if loads[usual] - loads[least] > patience else usual
        self._prefixes.add(sums_L, chosen)
        return self._engines[chosen]

    def _loads(self) -> list[int]:
        directory = self._directory
        return [0 if directory is None else directory.load(e.index) for e in self._engines]


def without_time(loads: list[Body]) -> list[Body]:
    """Return loads that are equal if a scheduler did nothing but write them again."""
    return [{**load, "timestamp": None} for load in loads]


def _foreign(index: int, address: EngineAddress) -> Endpoint:
    name = f"SGLang of engine {index}"
    require_alive = partial(_require_process, name=name, pid=address.pid)
    return Endpoint(address.url, name=name, require_alive=require_alive, key=address.key)


def _require_process(what: str, *, name: str, pid: int) -> None:
    """Raise ServerDiedError if a process of this machine has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        has_ended = stat.rpartition(")")[2].split()[0] in "ZX"  # its parent has not noticed yet
    except OSError:
        has_ended = True
    if has_ended:
        raise ServerDiedError(
            f"{what}: {name} (process {pid}) is gone; the rank that owns it says how it ended"
        )
