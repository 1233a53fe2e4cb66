"""A rank dies or hangs at a chosen moment of a whole run: one error by name, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybridrl.errors import DeadlineError, RemoteCallError, WorkerDiedError, is_restartable
from hybridrl.run.display import LiveView
from hybridrl.run.record import RunFolder, open_record
from hybridrl.run.train import train
from tests.end_to_end.small import read_metrics, small_config, small_overrides
from tests.waiting import wait_until

PHASES = ("evaluate", "generate", "logprobs", "update", "export")


class Ambush(LiveView):
    """A view that sends a signal to the last rank when a phase begins, after step 1."""

    def __init__(self, num_steps: int, *, at: str, number: int) -> None:
        super().__init__(num_steps)
        self._at, self._number = at, number

    def phase(self, name: str) -> None:
        super().phase(name)
        if name == self._at and self.num_done >= 1:
            os.kill(find_ranks(os.getpid())[-1].pid, self._number)


def find_ranks(driver: int) -> list[psutil.Process]:
    family = psutil.Process(driver).children(recursive=True)
    return [child for child in family if "ActorRolloutWorker" in " ".join(child.cmdline())]


def run_into(folder: Path, *overrides: str, at: str, number: int) -> BaseException:
    """Run until the ambush; return the error that ends the run."""
    config = small_config(
        folder,
        "trainer.export_hf=true",
        "algorithm.old_logprobs=recompute",
        "checkpoint.max_restarts=0",
        *overrides,
    )
    with (
        pytest.raises((RemoteCallError, DeadlineError)) as caught,
        open_record(config, resolved_yaml="mode: train\n") as record,
    ):
        view = Ambush(record.live.num_steps, at=at, number=number)
        train(config, record=RunFolder(record.run_log, view))
    return caught.value


@pytest.mark.shows("R7.2")
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase_ends_the_run_by_name(tmp_path: Path, phase: str) -> None:
    error = run_into(tmp_path / "run", at=phase, number=signal.SIGKILL)
    assert isinstance(error, WorkerDiedError)
    assert is_restartable(error)
    assert re.search(r"pid \d+, (killed by signal 9|without a word)", str(error))
    where, told = error.__notes__[-2:]
    assert re.fullmatch(rf"in step [23] of 3, {phase}, .* s after that began", where)
    [folder] = (tmp_path / "run" / "postmortem").iterdir()
    assert told == f"post-mortem: {folder}"
    assert where.partition(",")[0] in (folder / "what.txt").read_text()
    assert "rank 0," in (folder / "memory.csv").read_text()
    assert find_ranks(os.getpid()) == []


@pytest.mark.shows("R7.1")
@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_hangs_ends_the_run_at_its_deadline_by_name(tmp_path: Path) -> None:
    error = run_into(
        tmp_path / "run",
        "cluster.num_ranks_per_node=2",
        "cluster.call_timeout_s=10",
        at="update",
        number=signal.SIGSTOP,
    )
    assert isinstance(error, DeadlineError)
    assert "stopped by a signal" in str(error).splitlines()[1]  # of the ranks the first
    [folder] = (tmp_path / "run" / "postmortem").iterdir()
    waiting = (folder / "stacks.txt").read_text()
    assert "in all_reduce" in waiting or "in all_gather" in waiting
    assert find_ranks(os.getpid()) == []


@pytest.mark.nightly  # by day run/test_supervise.py kills the parent of a driver
@pytest.mark.shows("R7.6")
def test_ranks_end_soon_after_their_driver_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "hybridrl.main"),
        *small_overrides(folder, "trainer.num_steps=100000"),
    ]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    try:
        wait_until(
            lambda: (folder / "metrics.jsonl").is_file() and len(read_metrics(folder)) >= 2,
            deadline_s=180,
        )
        ranks = find_ranks(driver.pid)
        assert ranks
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        wait_until(lambda: not any(rank.is_running() for rank in ranks), deadline_s=60)
    finally:
        driver.kill()
        driver.wait()
        for one in family:  # two of Ray's own processes stay for a minute, and do nothing
            if one.is_running():
                one.kill()
