from __future__ import annotations

import pytest

from hybridrl.errors import HybridRLError, RewardError, WorkerDiedError
from hybridrl.run.supervise import with_restarts


def _died() -> WorkerDiedError:
    return WorkerDiedError(rank=1, host="h", method="update", cause="killed", traceback="")


class Attempts:
    """Fails as told; a checkpoint is made in the attempts that say so."""

    def __init__(self, *outcomes: tuple[HybridRLError | None, int]) -> None:
        self.outcomes = list(outcomes)
        self.step = 0

    def __call__(self) -> None:
        error, num_steps = self.outcomes.pop(0)
        self.step += num_steps
        if error is not None:
            raise error


def test_lost_workers_are_started_again_until_the_work_is_done() -> None:
    attempts = Attempts((_died(), 0), (_died(), 0), (None, 0))
    with_restarts(
        attempts, explain=lambda _: None, newest_step=lambda: attempts.step, max_in_a_row=2
    )
    assert not attempts.outcomes


def test_without_a_new_checkpoint_between_only_so_many_restarts_are_made() -> None:
    attempts = Attempts((_died(), 0), (_died(), 0), (_died(), 0), (None, 0))
    with pytest.raises(WorkerDiedError):
        with_restarts(
            attempts, explain=lambda _: None, newest_step=lambda: attempts.step, max_in_a_row=2
        )
    assert len(attempts.outcomes) == 1


def test_a_new_checkpoint_starts_the_count_anew() -> None:
    attempts = Attempts(*[(_died(), 1)] * 9, (None, 0))
    with_restarts(
        attempts, explain=lambda _: None, newest_step=lambda: attempts.step, max_in_a_row=1
    )
    assert not attempts.outcomes


def test_an_error_that_would_come_again_is_raised_at_once() -> None:
    attempts = Attempts((RewardError("a bug in the reward"), 0), (None, 0))
    with pytest.raises(RewardError):
        with_restarts(
            attempts, explain=lambda _: None, newest_step=lambda: attempts.step, max_in_a_row=2
        )
    assert len(attempts.outcomes) == 1


def test_restarts_can_be_switched_off() -> None:
    attempts = Attempts((_died(), 1), (None, 0))
    with pytest.raises(WorkerDiedError):
        with_restarts(
            attempts, explain=lambda _: None, newest_step=lambda: attempts.step, max_in_a_row=0
        )
