from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.errors import DeadlineError, RemoteCallError, WorkerDiedError, is_restartable
from hybridrl.run.display import LiveView
from hybridrl.run.record import open_record
from hybridrl.run.train import train
from tests.end_to_end.small import read_metrics, small_config, small_overrides
from tests.serving.processes import processes_with
from tests.waiting import wait_until

PHASES = (
    *("generate", "export"),  # in a step, and behind the last one
    *(pytest.param(p, marks=pytest.mark.nightly) for p in ("evaluate", "logprobs", "update")),
)


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
    return processes_with("ActorRolloutWorker", below=driver)


def run_into(folder: Path, *overrides: str, at: str, number: int) -> BaseException:
    """Run until the ambush; return the error that ends the run."""
    once = ("trainer.export_hf=true", "checkpoint.max_restarts=0")
    config = small_config(folder, *once, "algorithm.old_logprobs=recompute", *overrides)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises((RemoteCallError, DeadlineError)) as caught,
    ):
        patch.setattr("hybridrl.run.display.LiveView", partial(Ambush, at=at, number=number))
        with open_record(config, resolved_yaml="mode: train\n") as record:
            train(config, record=record)
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


_DEADLINE_S = 200.0


@pytest.mark.shows("R4.1")
@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, signal.SIGTERM))],
)
def test_a_signal_ends_the_run_after_its_step_saved_and_with_its_status(
    tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "run"
    with _started(folder, "trainer.num_steps=100000", "trainer.export_hf=true") as process:
        wait_until(lambda: _num_steps(folder) >= 3, deadline_s=_DEADLINE_S, process=process)
        if number == signal.SIGHUP:  # of a terminal: it goes to the processes of Ray, too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 128 + number, output
    assert "stopped on request" in output
    assert "the run ended with an error" not in (folder / "log.txt").read_text()
    newest = CheckpointStore(folder / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.run.step == _num_steps(folder) - 1  # step 0 is an evaluation
    assert (folder / "hf" / "config.json").is_file()


@pytest.mark.nightly  # by day ranks are killed in each phase, within the process
def test_a_killed_worker_ends_the_command_by_name_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    endless = ("trainer.num_steps=100000", "cluster.num_ranks_per_node=2")
    with _started(folder, *endless, "checkpoint.max_restarts=0") as process:
        wait_until(lambda: _num_steps(folder) >= 2, deadline_s=_DEADLINE_S, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        find_ranks(process.pid)[1].kill()
        output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 1, output
    assert "WorkerDiedError: rank" in output
    *_, where, post_mortem = output.splitlines()
    assert where.startswith("in step ")
    assert Path(post_mortem.removeprefix("post-mortem: "), "what.txt").is_file()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.nightly
@pytest.mark.shows("R3.5")
def test_a_killed_raylet_is_named_and_the_run_goes_on_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _started(folder, "trainer.num_steps=8", "checkpoint.every_num_steps=2") as process:
        wait_until(lambda: _num_steps(folder) >= 4, deadline_s=_DEADLINE_S, process=process)
        family = psutil.Process(process.pid).children(recursive=True)
        [raylet] = [one for one in family if one.name() == "raylet"]
        raylet.kill()
        output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, output
    assert "DriverDiedError: the driver " in output
    assert "raylet ended" in output
    assert "(restart 1 of 3)" in output
    [post_mortem] = (folder / "postmortem").iterdir()
    assert "DriverDiedError" in (post_mortem / "what.txt").read_text()
    assert [line["step"] for line in read_metrics(folder)] == list(range(9))
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive  # not even the agents of Ray's own


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Processes that start meanwhile heed SIGINT, though a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.shows("R4.2")
@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("module", ["hydra", "hybridrl.config.load", "ray._raylet"])
def test_ctrl_c_while_imports_run_ends_quietly(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hybridrl.main"]
    with subprocess.Popen(
        [*command, *small_overrides(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any(line.rpartition("|")[2].strip() == module for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=_DEADLINE_S)
    shown = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, output, shown) == (130, "", ["interrupted"])
    assert not (tmp_path / "run").exists()


@contextmanager
def _started(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.main", *small_overrides(folder, *overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            for one in [*family, psutil.Process(process.pid)]:
                one.kill()
            process.wait(timeout=60)


def _num_steps(folder: Path) -> int:
    return len(read_metrics(folder)) if (folder / "metrics.jsonl").is_file() else 0
