from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import EngineError, PhaseError
from hybridrl.sampler import Sampler
from hybridrl.workers.rollout.event_loop import ProgramCall, Progress, RequestGate, run_program

NO_SAMPLER = cast(Sampler, None)


def test_a_second_call_or_a_release_is_refused_while_one_runs() -> None:
    gate = RequestGate()
    with pytest.raises(ZeroDivisionError), gate.admit() as call, call.request(4):
        with pytest.raises(PhaseError, match="refused: 4 requests"), gate.admit():
            pass
        with pytest.raises(PhaseError, match="release was refused"):
            gate.require_idle("release")
        raise ZeroDivisionError
    gate.require_idle("release")
    assert gate.drain(timeout_s=0.0) == 0


def run_until_aborted(gate: RequestGate, started: Event) -> None:
    async def program(_: Sampler) -> None:
        with call.request(1):
            pass
        with call.request(5):
            started.set()
            await asyncio.sleep(60.0)

    with gate.admit() as call:
        run_program(program, NO_SAMPLER, call)


@pytest.mark.shows("2.8")
def test_at_the_deadline_what_is_left_is_aborted_and_counted() -> None:
    gate = RequestGate()
    for _ in range(3):
        started = Event()
        with ThreadPoolExecutor(1) as pool:
            generating = pool.submit(run_until_aborted, gate, started)
            assert started.wait(10.0)
            gate.pause()
            assert gate.drain(timeout_s=0.01) == 5
            with pytest.raises(EngineError, match="aborted 5 of 6 requests"):
                generating.result(10.0)
        gate.resume()


class Answers:
    """Work of some steps, each of which answers one request or none."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = answers
        self.num_steps = 0
        self.waiting: list[asyncio.Future[None]] = []
        self.resumed: list[int] = []
        """Steps done when each task ran again."""

    def step(self) -> Progress:
        if self.num_steps == len(self._answers):
            return Progress.NO_WORK
        self.num_steps += 1
        if not self._answers[self.num_steps - 1]:
            return Progress.WORKED
        self.waiting.pop(0).set_result(None)
        return Progress.ANSWERED

    async def task(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future
        self.resumed.append(self.num_steps)

    def run(self) -> list[int]:
        async def program(_: Sampler) -> None:
            await asyncio.gather(*(self.task() for _ in range(sum(self._answers))))

        run_program(program, NO_SAMPLER, ProgramCall(), step=self.step)
        return self.resumed


def test_tasks_run_behind_every_second_step_and_the_last_waits_for_none() -> None:
    assert Answers([True, True, True, True]).run() == [2, 2, 4, 4]
    assert Answers([False, False, True, False]).run() == [3]
    assert Answers([True]).run() == [1]
    assert Answers([True, True, True]).run() == [2, 2, 3]


@given(st.lists(st.booleans(), max_size=12))
def test_each_task_runs_at_most_one_step_behind_its_answer(answers: list[bool]) -> None:
    resumed = Answers(answers).run()
    answered = [number for number, is_answer in enumerate(answers, start=1) if is_answer]
    assert all(0 <= ran - done <= 1 for ran, done in zip(resumed, answered, strict=True))
