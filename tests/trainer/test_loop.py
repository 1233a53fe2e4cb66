from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from hybridrl.errors import TrainingError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.trainer.interrupt import Interrupt, RunInterrupted, RunStopped
from hybridrl.trainer.loop import Loop, UpdateGuard


class Recorded:
    """Keeps what a loop records."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, set[str]]] = []

    def record(self, step: int, metrics: Metrics) -> None:
        self.lines.append((step, set(metrics)))


def _loop(recorded: Recorded, *, num_steps: int, eval_every: int, num_skipped: int = 0) -> Loop:
    return Loop(
        take_step=lambda _: {
            "reward/mean": Mean(1.0),
            "policy/skipped_updates": Sum(num_skipped),
        },
        evaluate=lambda step: {"eval/reward/mean": Mean(float(step))},
        begin_step=lambda _: None,
        record=recorded.record,
        num_steps=num_steps,
        eval_every=eval_every,
        guard=UpdateGuard(max_skipped=2),
    )


@pytest.mark.shows("4.21")
def test_evaluation_runs_before_between_and_after_steps() -> None:
    recorded = Recorded()
    assert _loop(recorded, num_steps=5, eval_every=2).run() == 5
    evaluated = [step for step, names in recorded.lines if "eval/reward/mean" in names]
    assert evaluated == [0, 2, 4, 5]
    assert [step for step, _ in recorded.lines] == [0, 1, 2, 3, 4, 5]


def test_first_record_without_evaluation_is_a_step() -> None:
    recorded = Recorded()
    _loop(recorded, num_steps=2, eval_every=0).run()
    assert [step for step, _ in recorded.lines] == [1, 2]


@pytest.mark.shows("R9.6")
def test_consecutive_skipped_updates_end_the_run() -> None:
    recorded = Recorded()
    with pytest.raises(TrainingError, match=r"3 steps in a row.*at most 2 may be skipped.*lr"):
        _loop(recorded, num_steps=9, eval_every=0, num_skipped=1).run()
    assert [step for step, _ in recorded.lines] == [1, 2, 3]


def test_taken_update_resets_the_count_of_skipped_ones() -> None:
    guard = UpdateGuard(max_skipped=1)
    for num_skipped in (1, 0, 1, 0, 1):
        guard.check({"policy/skipped_updates": Sum(num_skipped)})
    with pytest.raises(TrainingError):
        guard.check({"policy/skipped_updates": Sum(1)})


def test_a_critic_that_cannot_step_ends_the_run_as_a_policy_does() -> None:
    guard = UpdateGuard(max_skipped=1)
    metrics: Metrics = {"policy/skipped_updates": Sum(0), "critic/skipped_updates": Sum(4)}
    guard.check(metrics)
    with pytest.raises(TrainingError, match=r"critic\.optimizer\.lr"):
        guard.check(metrics)


@pytest.mark.shows("R1.3")
def test_interrupt_saves_after_its_step() -> None:
    recorded, saved = Recorded(), []
    loop = _loop(recorded, num_steps=9, eval_every=3)

    def save(step: int, metrics: Metrics, *, is_last: bool) -> Metrics:
        saved.append((step, is_last))
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"time/checkpoint_s": Sum(1.0)}

    assert replace(loop, save=save, first_step=5).run() == 7
    assert saved == [(5, False), (6, False), (7, True)]
    assert [step for step, _ in recorded.lines] == [5, 6, 7]  # no evaluation of step 0
    costs = [step for step, names in recorded.lines if "time/checkpoint_s" in names]
    assert costs == [6, 7]  # each on the next line


def test_second_signal_does_not_wait_for_the_step() -> None:
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.is_set
        with pytest.raises(RunInterrupted) as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
    assert interrupted.value.number == signal.SIGHUP
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.shows("R4.1")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_with_steps_left_ends_with_128_and_the_signal(number: signal.Signals) -> None:
    loop = _interrupted_in_step(4, number)
    assert loop.run() == 4
    with pytest.raises(RunStopped) as stopped:
        loop.interrupt.raise_if_unfinished()
    assert stopped.value.code == 128 + number


@pytest.mark.shows("R4.1")
def test_signal_in_the_last_step_leaves_the_run_finished() -> None:
    loop = _interrupted_in_step(9, signal.SIGTERM)
    assert loop.run() == 9
    loop.interrupt.raise_if_unfinished()


@pytest.mark.shows("R4.3")
def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _interrupted_in_step(4, signal.SIGHUP).run() == 9
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupted_in_step(step: int, number: signal.Signals) -> Loop:
    def take_step(current: int) -> Metrics:
        if current == step:
            os.kill(os.getpid(), number)
        return {}

    return replace(_loop(Recorded(), num_steps=9, eval_every=0), take_step=take_step)
