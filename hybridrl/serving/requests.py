"""The way of a program's requests to the engines of the policy, with the faults of its phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import AskGroup, EnginePool, ask_process
from hybridrl.serving.faults import FaultPlan
from hybridrl.serving.router import Router


@dataclass(frozen=True, slots=True)
class PolicyRequests:
    """Opens the way between two updates: straight to the engines, or through the router."""

    router: Router | None
    faults: FaultPlan

    @asynccontextmanager
    async def open(
        self, pool: EnginePool, engines: Collection[EngineHandle], *, version: int
    ) -> AsyncIterator[AskGroup]:
        """Open the way of a pool to these engines; see ``Router.open``."""
        if self.router is None:
            yield self.faults.spoil(ask_process)
            return
        pool.on_left = self.router.leave_out
        async with self.router.open(engines, version=version) as ask:
            yield self.faults.spoil(ask)

    async def interrupt(self, engines: Collection[EngineHandle]) -> None:
        """Let open requests return with the tokens that they have.

        Engines that are gone lose theirs, which their requests notice.
        """
        if self.router is not None:
            self.router.interrupt()
            return
        calls = [asyncio.wrap_future(engine.interrupt()) for engine in engines]
        await asyncio.gather(*calls, return_exceptions=True)
