"""The loop in which a program samples: when steps are done, and when tasks run."""

from __future__ import annotations

import asyncio
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.sampler import Sampler
from hybridrl.workers.rollout.event_loop import ProgramCall, Progress, run_program

NO_SAMPLER = cast(Sampler, None)


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


def test_tasks_run_behind_every_second_step() -> None:
    assert Answers([True, True, True, True]).run() == [2, 2, 4, 4]
    assert Answers([False, False, True, False]).run() == [3]


def test_the_last_answer_waits_for_no_step() -> None:
    assert Answers([True]).run() == [1]
    assert Answers([True, True, True]).run() == [2, 2, 3]


@given(st.lists(st.booleans(), max_size=12))
def test_each_task_runs_at_most_one_step_behind_its_answer(answers: list[bool]) -> None:
    resumed = Answers(answers).run()
    answered = [number for number, is_answer in enumerate(answers, start=1) if is_answer]
    assert all(0 <= ran - done <= 1 for ran, done in zip(resumed, answered, strict=True))
