"""The event loop in which a program samples: opened for one program, in the calling thread."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial

from hybridrl.sampler import Program, Sampler, T
from hybridrl.workers.rollout.request_gate import ProgramCall


class Progress(Enum):
    """Outcome of a step of work."""

    NO_WORK = auto()
    WORKED = auto()
    ANSWERED = auto()
    """A request has its result, so a task can run."""


Step = Callable[[], Progress]
"""Does a bounded piece of work."""


def _no_step() -> Progress:
    return Progress.NO_WORK


class _StepWhenIdle(selectors.DefaultSelector):
    """Does steps of work while no task can run.

    A loop asks its selector to wait if no task is ready. So each step meets all requests that the
    program could make before it, whatever number of tasks they passed through. Hence a program that
    waits for nothing but samples gets the same batches, in the same order, in every run. The loop
    itself goes around once a result, not once a step: on cold caches that takes 0.15 ms.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return file events; wait for them only if there is no work either."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        end_s = math.inf if timeout is None else time.monotonic() + timeout
        while not (events := super().select(0)):
            progress = self._step()
            if progress is Progress.NO_WORK:
                return super().select(None if timeout is None else end_s - time.monotonic())
            if progress is Progress.ANSWERED or time.monotonic() >= end_s:
                break
        return events


def run_program(
    program: Program[T], sampler: Sampler, call: ProgramCall, *, step: Step = _no_step
) -> T:
    """Run a program until it returns, then end the tasks that it left behind.

    Args:
        program: gets the sampler.
        sampler: its requests are answered by ``step``, or through the loop's file events.
        call: counts requests; a drain aborts the program through it.
        step: called while all tasks wait; its errors end the program, and are raised here.

    Raises:
        EngineError: the program was aborted.
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
