"""The gate of a rollout engine: one program at a time, none while paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock

from hybridrl.errors import DeadlineError, EngineError, PhaseError

_ABORT_GRACE_S = 60.0


class ProgramCall:
    """One admitted program, and the number of its requests; other threads end or interrupt them."""

    def __init__(self, *, is_interrupted: bool = False) -> None:
        self.is_interrupted = is_interrupted
        """Whether requests return at once: nothing is sampled."""
        self.on_interrupt: Callable[[], None] | None = None
        """Ends the open requests at their present token; called in the program's loop."""
        self.num_requests = 0
        """Responses requested so far."""
        self.num_open = 0
        """Those that did not return yet; the responses of a group return together."""
        self.num_aborted = 0
        self.is_aborted = False
        self._task: asyncio.Task[object] | None = None
        self._lock = Lock()
        self._is_cancelled = False

    def attach(self) -> None:
        """Note the current task as the one to cancel. Called once, when the program starts."""
        with self._lock:
            self._task = asyncio.current_task()
        if self._is_cancelled:
            self._abort()

    def interrupt(self) -> None:
        """End the open requests at their present token, and later ones at once. Thread-safe."""
        with self._lock:
            self.is_interrupted, task = True, self._task
        if task is not None and self.on_interrupt is not None:
            with suppress(RuntimeError):  # the program has ended, and its loop with it
                task.get_loop().call_soon_threadsafe(self.on_interrupt)

    def cancel(self) -> None:
        """Cancel the program's task. Thread-safe."""
        with self._lock:
            self._is_cancelled, task = True, self._task
        if task is not None:
            with suppress(RuntimeError):  # the program has ended, and its loop with it
                task.get_loop().call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        """Note the requests that will not return. Runs in the program's thread."""
        if self._task is not None and not self._task.done():
            self.is_aborted, self.num_aborted = True, self.num_open
            self._task.cancel()

    @contextmanager
    def request(self, num_responses: int) -> Iterator[None]:
        """Count a request that is open in the block; an aborted program may have none."""
        self.require_alive()
        self.num_requests += num_responses
        self.num_open += num_responses
        try:
            yield
        finally:
            self.num_open -= num_responses

    def require_alive(self) -> None:
        """Raise EngineError if the program was aborted."""
        if self.is_aborted:
            raise EngineError(
                f"aborted {self.num_aborted} of {self.num_requests} requests: the engine was "
                "drained before they ended; raise rollout.drain_timeout_s to let them finish"
            )


class RequestGate:
    """Thread-safe: a program may run in one thread while another pauses and drains."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_paused = self._is_interrupted = False
        self._running: ProgramCall | None = None

    @contextmanager
    def admit(self) -> Iterator[ProgramCall]:
        """Hold the engine for one program; PhaseError if it is paused, or has one."""
        with self._changed:
            if self._is_paused:
                raise PhaseError(
                    "generate was refused: the engine is paused; it admits requests again after "
                    "continue_generation"
                )
            self.require_idle("generate")
            call = self._running = ProgramCall(is_interrupted=self._is_interrupted)
        try:
            yield call
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def require_idle(self, edge: str) -> None:
        """Raise PhaseError if a program is running; ``edge`` names the refused request."""
        with self._changed:  # re-entrant
            if self._running is not None:
                raise PhaseError(
                    f"{edge} was refused: {self._running.num_open} requests are running; "
                    "pause and drain the engine first"
                )

    def pause(self) -> None:
        """Admit no call from now on. Idempotent."""
        with self._changed:
            self._is_paused = True

    def interrupt(self) -> None:
        """Let requests return at their present token, until ``resume``. Idempotent."""
        with self._changed:
            self._is_interrupted, call = True, self._running
        if call is not None:
            call.interrupt()

    def resume(self) -> None:
        """Admit again, and sample again. Idempotent."""
        with self._changed:
            self._is_paused = self._is_interrupted = False
            if self._running is not None:
                self._running.is_interrupted = False

    def drain(self, timeout_s: float, *, grace_s: float = _ABORT_GRACE_S) -> int:
        """Wait until the running program ended; abort it at the deadline.

        Returns the number of requests aborted. DeadlineError if the program does not end within
        ``grace_s`` after that.
        """
        with self._changed:
            call = self._running
            if call is None or self._changed.wait_for(lambda: self._running is None, timeout_s):
                return 0
        call.cancel()
        with self._changed:
            if not self._changed.wait_for(lambda: self._running is not call, grace_s):
                raise DeadlineError(
                    f"{call.num_open} requests and their program ignored their abort for "
                    f"{grace_s:.0f} s: a decode step hangs, or a task that blocks; restart the "
                    "engine"
                )
            return call.num_aborted
