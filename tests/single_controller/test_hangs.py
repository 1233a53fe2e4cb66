from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from hybridrl.diagnostics.process_report import reports_on
from hybridrl.errors import DeadlineError, RemoteCallError, WorkerDiedError, is_restartable
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
from tests.single_controller.fault_workers import Joined, Mortal
from tests.waiting import wait_until_gone

pytestmark = pytest.mark.usefixtures("ray_cluster")


def start(
    worker: type[Worker],
    *args: object,
    num_ranks: int = 2,
    timeout_s: float = 60.0,
    **kwargs: object,
) -> RayWorkerGroup:
    return RayWorkerGroup(
        RayResourcePool([num_ranks]),
        RayClassWithInitArgs(worker, *args, **kwargs),
        timeout_s=timeout_s,
        grace_s=2.0,
        start_timeout_s=30.0 if args[:1] == ("construction",) and kwargs["hangs"] else 120.0,
    )


def wait_until_ranks_are_gone(error: BaseException) -> None:
    assert reports_on(error)
    wait_until_gone(report.pid for report in reports_on(error))


@pytest.mark.shows("R7.1")
def test_a_rank_that_loops_is_named_before_ranks_that_wait() -> None:
    with start(Joined, 60.0, num_ranks=3) as ranks, pytest.raises(DeadlineError) as caught:
        ranks.hang_on(1)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("ranks [0, 1, 2] of 3 have not answered hang_on() within 3 s")
    assert "raise timeout_s if that is not enough" in lines[0]
    assert "rank 1 (" in lines[1]
    assert "running): hang_on() for" in lines[1]
    assert "at hang_here (fault_workers.py:" in lines[1]
    for line in lines[2:]:
        assert "waits for other ranks in hang_on() for" in line
        assert "all_reduce" in line.rpartition(" at ")[2]
    assert all("hang_on" in report.stacks for report in reports_on(caught.value))
    assert is_restartable(caught.value)
    wait_until_ranks_are_gone(caught.value)


def test_ranks_that_give_up_waiting_are_not_blamed() -> None:
    with start(Joined, 2.0) as ranks, pytest.raises(DeadlineError) as caught:
        ranks.hang_long_on(1)
    assert str(caught.value).startswith("rank 1 on ")
    assert "hangs in hang_long_on(): others gave up waiting" in str(caught.value)
    assert "at hang_here (fault_workers.py:" in str(caught.value)
    assert any(note.startswith("rank 0 on") for note in caught.value.__notes__)
    assert is_restartable(caught.value)
    wait_until_ranks_are_gone(caught.value)


@pytest.mark.shows("R7.3")
def test_the_rank_that_raised_is_named_first() -> None:
    with start(Joined, 60.0, num_ranks=3) as ranks, pytest.raises(RemoteCallError) as caught:
        ranks.raise_on(2)
    assert caught.value.rank == 2
    assert caught.value.remote_cause == "ArithmeticError: no sum today"
    assert not is_restartable(caught.value)
    wait_until_ranks_are_gone(caught.value)


@pytest.mark.shows("R7.2")
def test_a_killed_rank_is_named_with_signal_and_activity() -> None:
    with start(Mortal) as ranks, pytest.raises(WorkerDiedError) as caught:
        pids = ranks.pid()
        napping = ranks.execute_all("nap")
        os.kill(pids[1], signal.SIGKILL)
        napping.get()
    assert f"pid {pids[1]}, " in str(caught.value)
    assert "signal 9 (SIGKILL)" in str(caught.value) or "kill -9" in str(caught.value)
    assert is_restartable(caught.value)
    assert [report.is_gone for report in reports_on(caught.value)] == [False, True]
    wait_until_ranks_are_gone(caught.value)


def test_a_stopped_rank_is_named_and_ends_with_its_group() -> None:
    with (
        start(Mortal, timeout_s=3.0) as ranks,
        pytest.raises(DeadlineError, match="stopped by a signal") as caught,
    ):
        os.kill(ranks.pid()[0], signal.SIGSTOP)
        ranks.pid()
    wait_until_ranks_are_gone(caught.value)


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_fault_in_a_constructor_ends_the_start_by_name(*, hangs: bool) -> None:
    with pytest.raises(DeadlineError if hangs else WorkerDiedError) as caught:
        start(Mortal, "construction", 1, hangs=hangs)
    assert "rank 1" in str(caught.value)
    assert "Mortal.__init__() for" in str(caught.value)
    assert is_restartable(caught.value)
    wait_until_ranks_are_gone(caught.value)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_fault_while_closing_ends_the_group_all_the_same(
    caplog: pytest.LogCaptureFixture, *, hangs: bool
) -> None:
    with caplog.at_level(logging.WARNING), start(Mortal, "close", 1, hangs=hangs) as ranks:
        pids = ranks.pid()
    logged = caplog.text
    assert ("did not close within 2 s" in logged) == hangs
    assert ("at hang_here (fault_workers.py:" in logged) == hangs
    wait_until_gone(pids)


@pytest.mark.shows("R3.4")
def test_a_group_can_be_built_anew_at_once_after_each_death() -> None:
    pool = RayResourcePool([2])
    for round_number in range(2):
        with (
            RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), grace_s=2.0) as ranks,
            pytest.raises(WorkerDiedError, match="rank 1"),
        ):
            pids = ranks.pid()
            if round_number == 0:  # this one does not obey when it is asked to leave
                os.kill(pids[0], signal.SIGSTOP)
            os.kill(pids[1], signal.SIGKILL)
            ranks.pid()
        wait_until_gone(pids)


def test_an_error_of_the_driver_reports_ranks_that_are_well() -> None:
    with pytest.raises(ZeroDivisionError) as caught, start(Mortal) as ranks:
        ranks.pid()
        raise ZeroDivisionError
    assert [report.where for report in reports_on(caught.value)] == ["idle, after pid()"] * 2
    assert all(report.stacks for report in reports_on(caught.value))


@pytest.mark.nightly
def test_ranks_of_other_and_of_lost_nodes_are_reported() -> None:
    script = [sys.executable, "-m", "tests.single_controller.hang_on_two_nodes"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["nodes"] == 2
    assert [top.partition(" ")[0] for top in told["tops"]] == ["hang_on_both"] * 2
    assert told["message"].count("hang_on_both() for") == 2
    assert told["death"] == told["lost"]
    assert told["state"].startswith("unreachable: ")
