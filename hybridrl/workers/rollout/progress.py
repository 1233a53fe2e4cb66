"""How long a request may wait: as long as its engine makes progress, for whichever request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from hybridrl.errors import DeadlineError, EngineError, PhaseError

_NUM_LOOKS = 4


@asynccontextmanager
async def while_it_works(
    progress: Callable[[], Awaitable[object]], *, timeout_s: float, name: str
) -> AsyncIterator[None]:
    """Let the block wait for an engine: behind others, or for a long response, as long as it takes.

    Args:
        progress: returns how far the engine is; asked four times in ``timeout_s``. An error is no
            progress.
        timeout_s: seconds in which it must be further (``rollout.request_timeout_s``).

    Raises:
        DeadlineError: it was not.
    """
    loop = asyncio.get_running_loop()

    async def watch(limit: asyncio.Timeout) -> None:
        last: object = None
        while True:
            await asyncio.sleep(timeout_s / _NUM_LOOKS)
            with suppress(EngineError, PhaseError, DeadlineError):
                now = await progress()
                if now != last and not limit.expired():
                    last = now
                    limit.reschedule(loop.time() + timeout_s)

    try:
        async with asyncio.timeout(timeout_s) as limit:
            watching = asyncio.ensure_future(watch(limit))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError as error:
        if isinstance(error, DeadlineError):  # of the block
            raise
        raise DeadlineError(
            f"{name} made no progress within rollout.request_timeout_s={timeout_s:g} s; raise it "
            "if an engine may compute for longer before a token"
        ) from error
