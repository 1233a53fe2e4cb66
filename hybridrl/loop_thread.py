"""An event loop that runs on in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from hybridrl.sampler import T

_END_S = 5.0


class LoopThread:
    """Runs coroutines of other threads. End it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it runs nothing any more."""
        return not self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine, and do not wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and wait for its result."""
        return self.start(work).result()

    def cancel_all(self) -> None:
        """Cancel all tasks, and wait until they have ended. A no-op after the end."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if not self.has_ended:
            self.run(cancel())

    def end(self) -> None:
        """Cancel all tasks, and end the thread; tasks that continue are left in it. Idempotent."""
        if not self.has_ended:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()  # the runner's end cancels the tasks


def is_cancelled(error: BaseException) -> bool:
    """Whether ``error`` cancels this task; clients raise the same where a connection closes."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
