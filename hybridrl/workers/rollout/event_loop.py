"""Programs of a rollout engine: a gate that admits one at a time, and the event loop of each."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from threading import Condition, Lock

from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.sampler import Program, Sampler, T

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


class Progress(Enum):
    """Outcome of a step of work."""

    NO_WORK = auto()
    WORKED = auto()
    ANSWERED = auto()  # a request has its result, so a task can run


Step = Callable[[], Progress]
"""Does a bounded piece of work."""

_STEPS_A_ROUND = 2
"""Steps from one round of the loop to the next, at least, while there is work."""


class _StepWhenIdle(selectors.DefaultSelector):
    """Does steps of work while no task can run.

    A loop asks its selector to wait if no task is ready. So each step meets all requests that the
    program could make before it, whatever number of tasks they passed through. Hence a program that
    waits for nothing but samples gets the same batches, in the same order, in every run. The loop
    itself goes around once for the results of some steps: after a step the caches hold the model,
    and the Python of a conversation's turn takes twice as long there as behind another turn's.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return file events; wait for them only if there is no work either."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        is_answered, num_steps = False, 0
        while not (events := super().select(0)):
            is_due = is_answered or time.monotonic() >= end_s
            if is_due and num_steps >= _STEPS_A_ROUND:
                break
            progress, num_steps = self._step(), num_steps + 1
            if progress is Progress.NO_WORK:
                left_s = 0.0 if is_answered else end_s - time.monotonic()
                return super().select(None if left_s == math.inf else left_s)
            is_answered |= progress is Progress.ANSWERED
        return events


def run_program(
    program: Program[T],
    sampler: Sampler,
    call: ProgramCall,
    *,
    step: Step = lambda: Progress.NO_WORK,
) -> T:
    """Run a program until it returns, then end the tasks that it left behind.

    ``step`` is called while all tasks wait. A drain that aborts ``call`` is an EngineError here.
    """
    results: list[T] = []

    async def attached() -> None:
        call.attach()
        # Not the task's result: `Runner` makes signal.signal print the task, and so all samples.
        results.append(await program(sampler))

    loop_factory = partial(asyncio.SelectorEventLoop, _StepWhenIdle(step))
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            runner.run(attached())
        except (Exception, asyncio.CancelledError):
            call.require_alive()
            raise
    call.require_alive()  # it may have suppressed its cancellation
    return results[0]
