"""The way of a program's requests to the engines of the policy: by calls, or through the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from hybridrl.serving.engine_handle import EngineHandle, SamplingEngine
from hybridrl.serving.engine_pool import AskGroup, ask_process
from hybridrl.serving.faults import FaultPlan
from hybridrl.serving.policy_router import PolicyRouter


@dataclass(frozen=True, slots=True)
class PolicyRequests:
    """Opens the way between two updates, with the faults of one phase."""

    router: PolicyRouter | None
    faults: FaultPlan

    @asynccontextmanager
    async def open(
        self, engines: Collection[SamplingEngine], *, version: int
    ) -> AsyncIterator[AskGroup]:
        """Open the way to these engines; see ``PolicyRouter.open``."""
        async with AsyncExitStack() as opened:
            ask: AskGroup = ask_process
            if self.router is not None:
                routes = self.router.open(engines, version=version)
                ask = await opened.enter_async_context(routes)
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
