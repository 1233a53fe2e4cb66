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


DONE = (None, 0)


@pytest.mark.shows("R3.2", "R3.3")
@pytest.mark.parametrize(
    ("outcomes", "max_in_a_row", "error", "num_left"),
    [
        pytest.param([(_died(), 0)] * 2 + [DONE], 2, None, 0, id="until the work is done"),
        pytest.param([(_died(), 0)] * 3 + [DONE], 2, WorkerDiedError, 1, id="so many in a row"),
        pytest.param([(_died(), 1)] * 9 + [DONE], 1, None, 0, id="a checkpoint starts the count"),
        pytest.param([(RewardError("a bug"), 0), DONE], 2, RewardError, 1, id="would come again"),
        pytest.param([(_died(), 1), DONE], 0, WorkerDiedError, 1, id="switched off"),
    ],
)
def test_lost_workers_restart_and_survived_errors_are_explained(
    outcomes: list[tuple[HybridRLError | None, int]],
    max_in_a_row: int,
    error: type[HybridRLError] | None,
    num_left: int,
) -> None:
    attempts, explained = Attempts(*outcomes), list[BaseException]()

    def run() -> None:
        with_restarts(
            attempts,
            explain=explained.append,
            newest_step=lambda: attempts.step,
            max_in_a_row=max_in_a_row,
        )

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert len(attempts.outcomes) == num_left
    assert len(explained) == len(outcomes) - num_left - 1
