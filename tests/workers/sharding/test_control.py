from __future__ import annotations

import pickle
import time

import pytest
import torch.distributed as dist

from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.workers.sharding.control import ControlGroup, Limit, StageError
from tests.ranks import run_ranks


def _everywhere_twice(rank: int) -> tuple[str, str | None, int]:
    control = ControlGroup(timeout_s=20.0)

    def act() -> int:
        if rank == 1:
            raise ValueError("engine said 503")
        return rank

    with pytest.raises(StageError) as raised:
        control.everywhere("wake", act)
    cause = raised.value.__cause__
    result = control.everywhere("wake", lambda: rank * 10)
    return str(raised.value), None if cause is None else repr(cause), result


def test_the_same_error_is_raised_everywhere_and_the_next_stage_works() -> None:
    text = "wake failed on rank 1: ValueError: engine said 503"
    cause = "ValueError('engine said 503')"
    assert run_ranks(2, _everywhere_twice) == [(text, None, 0), (text, cause, 10)]


def _true_and_largest(rank: int) -> tuple[bool, bool, int, int]:
    control = ControlGroup(timeout_s=20.0)
    return (
        control.is_true_anywhere("none", flag=False),
        control.is_true_anywhere("one", flag=rank == 2),
        control.largest("value", rank * 2**40),
        -control.largest("smallest", -(rank + 5)),
    )


def test_a_flag_and_a_value_are_agreed_upon() -> None:
    assert run_ranks(3, _true_and_largest) == [(False, True, 2 * 2**40, 5)] * 3


def _one_rank_samples_longer_than_a_stage_may_take(rank: int, late: int) -> str:
    control = ControlGroup(timeout_s=1.0)
    if rank == late:
        time.sleep(3.0)
    control.meet("generate", Limit(30.0, "rollout.skew_timeout_s"))
    control.exchange("pause", None)
    if rank == late:
        dist.barrier()  # of the other group: this rank does not come
        return ""
    with pytest.raises(DeadlineError) as raised:
        control.meet("generate", Limit(1.0, "rollout.skew_timeout_s"))
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_differ_in_sampling_but_not_for_ever(late: int) -> None:
    texts = run_ranks(2, _one_rank_samples_longer_than_a_stage_may_take, late)
    assert texts[1 - late] == (
        "generate: not all 2 ranks answered within 1 s; a rank died or is stuck. "
        "If the stage is only slow, raise rollout.skew_timeout_s"
    )


def _ranks_take_different_ways(rank: int) -> str:
    control = ControlGroup(timeout_s=20.0)
    with pytest.raises(PhaseError) as raised:
        control.exchange("pause" if rank else "drain", None)
    return str(raised.value)


def test_ranks_that_took_different_ways_are_told_at_once() -> None:
    texts = run_ranks(2, _ranks_take_different_ways)
    assert texts[0] == (
        "rank 0 is at stage 'drain' and another rank is not; all 2 ranks must enter and leave a "
        "rollout phase together"
    )
    assert texts[1].startswith("rank 1 is at stage 'pause' and another rank is not")


def test_one_process_alone_needs_no_group() -> None:
    control = ControlGroup(timeout_s=1.0)
    assert (control.world_size, control.rank) == (1, 0)
    assert control.everywhere("stage", lambda: 7) == 7
    with pytest.raises(StageError, match="stage failed on rank 0: ZeroDivisionError: ") as raised:
        control.everywhere("stage", lambda: 1 // 0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_the_stage_error_survives_the_way_to_the_driver() -> None:
    error = StageError("sync", {3: "LedgerError: lost", 1: "OSError: gone"}, of="engine")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, StageError)
    assert isinstance(copy, EngineError)
    assert str(copy) == "sync failed on engine 1: OSError: gone; engine 3: LedgerError: lost"
    assert (copy.stage, copy.failures) == (error.stage, error.failures)
