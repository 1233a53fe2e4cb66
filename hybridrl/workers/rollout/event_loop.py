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

_STEPS_A_ROUND = 2
"""Steps from one round of the loop to the next, at least, while there is work."""


def _no_step() -> Progress:
    return Progress.NO_WORK


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
    program: Program[T], sampler: Sampler, call: ProgramCall, *, step: Step = _no_step
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
