from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

import hybridrl
from hybridrl.diagnostics.process_report import RankReport, attach_reports, reports_on
from hybridrl.errors import ConfigError, HybridRLError, RewardError, WorkerDiedError
from hybridrl.run.launch import with_restarts
from hybridrl.run.record import open_record, write_postmortem
from hybridrl.trainer.interrupt import RunInterrupted
from tests.composing import composed
from tests.end_to_end.small import SMALL, small_config

_PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
from hybridrl.config.load import load_config
from hybridrl.errors import DriverDiedError
from hybridrl.trainer.interrupt import Interrupt
from hybridrl.run.launch import supervise
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
try:
    has_begun = supervise(load_config(json.loads(sys.argv[2])))
except DriverDiedError as error:
    sys.exit("\\n".join([f"given up: {error}", *error.__notes__]))
"""


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def _arguments(folder: Path, *overrides: str) -> tuple[str, str]:
    values = composed(f"trainer.run_dir={folder}/run", *overrides, base=SMALL)
    return str(folder / "run"), json.dumps(values)


def _run(folder: Path, driver: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return _python(_PROGRAM + driver, *_arguments(folder, *overrides))


@contextmanager
def _started(folder: Path, driver: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PROGRAM + driver, *_arguments(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_run_starts_without_heavy_imports() -> None:
    heavy = {"torch", "transformers"}  # a thread imports them
    program = f"import sys, hybridrl.run.launch; sys.exit(str({heavy} & set(sys.modules)))"
    assert _python(program).stderr.strip() == "set()"


@pytest.mark.shows("R3.5")
@pytest.mark.parametrize(
    "death", [pytest.param("os._exit(1)", marks=pytest.mark.nightly), "os.kill(os.getpid(), 9)"]
)
def test_a_driver_that_dies_is_named_kept_and_started_again(tmp_path: Path, death: str) -> None:
    done = _run(tmp_path, f"print(has_begun, flush=True)\nif not has_begun:\n    {death}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\nTrue\n"
    assert "DriverDiedError: the driver (process " in done.stderr
    assert "continue from step 0 (restart 1 of 3)" in done.stderr
    assert "DriverDiedError" in (tmp_path / "run" / "log.txt").read_text()
    [folder] = (tmp_path / "run" / "postmortem").iterdir()
    assert "restartable: yes" in (folder / "what.txt").read_text()


@pytest.mark.shows("R3.5")
def test_a_driver_that_always_dies_is_given_up(tmp_path: Path) -> None:
    done = _run(tmp_path, "print('x', flush=True); os._exit(1)", "checkpoint.max_restarts=2")
    assert done.returncode == 1
    assert done.stdout == "x\n" * 3
    assert "given up: the driver" in done.stderr


@pytest.mark.shows("R3.5")
def test_what_a_dead_driver_started_is_gone_before_the_next_one_begins(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = _run(
        tmp_path,
        "note = folder / 'pid'\n"
        "if has_begun:\n"
        "    print(os.path.exists('/proc/' + note.read_text()))\n"
        "else:\n"
        f"    note.write_text(str(subprocess.Popen({sleep}, start_new_session=True).pid))\n"
        "    os._exit(1)",
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(7)", 7), pytest.param("raise ValueError", 1, marks=pytest.mark.nightly)],
)
def test_an_end_in_order_is_the_end(tmp_path: Path, end: str, status: int) -> None:
    done = _run(tmp_path, end)
    assert done.returncode == status
    assert "DriverDiedError" not in done.stderr


_STEPS = """
interrupt = Interrupt()
with interrupt.listening():
    print(os.getpid(), flush=True)
    while not interrupt.is_set:
        time.sleep(0.01)
    time.sleep(0.2)  # the rest of the step, into which an echo of the signal falls
    interrupt.note_unfinished()
interrupt.raise_if_unfinished()
"""


@pytest.mark.shows("R4.1")
@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "parent"),
        (signal.SIGINT, "both"),  # as Ctrl-C in a terminal
        *(
            pytest.param(number, whom, marks=pytest.mark.nightly)
            for number, whom in (
                *((signal.SIGHUP, "parent"), (signal.SIGINT, "parent")),
                *((signal.SIGTERM, "both"), (signal.SIGHUP, "both")),
            )
        ),
    ],
)
def test_a_signal_stops_the_run_once_whoever_gets_it(
    tmp_path: Path, number: signal.Signals, whom: str
) -> None:
    with _started(tmp_path, _STEPS) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        if whom == "both":
            os.kill(child, number)
        assert process.wait(timeout=60) == 128 + number


_DEAF = """
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(200)"])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # as within a call of C++
print(process.pid, flush=True)
time.sleep(200)
"""


@pytest.mark.shows("R4.5")
def test_the_third_signal_ends_a_driver_that_heeds_none(tmp_path: Path) -> None:
    with _started(tmp_path, _DEAF) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        num_sent = 0
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            num_sent += 1
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.5)  # sooner the next one is an echo
        assert num_sent >= 3
        assert process.returncode == 128 + signal.SIGKILL
    assert not psutil.pid_exists(pid)


@pytest.mark.shows("R7.6")
def test_a_driver_ends_with_its_parent(tmp_path: Path) -> None:
    with _started(tmp_path, _STEPS) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert child.wait(timeout=60) is None


_WATCHED = """
import os, pathlib, sys
from hybridrl.run.launch import driver_watchdog
with driver_watchdog("gone without a word", log_file=pathlib.Path(sys.argv[1])):
    {act}
"""


@pytest.mark.parametrize(
    ("act", "word"),
    [
        ("os.kill(os.getpid(), 9)", "gone without a word\n"),
        ("raise ValueError('known')", None),
        pytest.param("os._exit(1)", "gone without a word\n", marks=pytest.mark.nightly),
        *(pytest.param(a, None, marks=pytest.mark.nightly) for a in ("pass", "sys.exit(3)")),
    ],
)
def test_the_death_of_a_driver_is_reported_in_output_and_log_an_end_in_order_is_not(
    act: str, word: str | None, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    done = _python(_WATCHED.format(act=act), str(log))
    assert ("gone without a word" in done.stderr) == log.exists() == bool(word)
    if word:
        assert done.returncode != 0
        assert done.stderr == log.read_text() == word


def _died() -> WorkerDiedError:
    return WorkerDiedError(rank=1, host="10.0.0.2", method="update", cause="killed", traceback="")


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
    remaining, step, explained = list(outcomes), 0, list[BaseException]()

    def attempt() -> None:
        nonlocal step
        error, num_steps = remaining.pop(0)
        step += num_steps  # of which a checkpoint is made
        if error is not None:
            raise error

    with nullcontext() if error is None else pytest.raises(error):
        with_restarts(
            attempt, explain=explained.append, newest_step=lambda: step, max_in_a_row=max_in_a_row
        )
    assert len(remaining) == num_left
    assert len(explained) == len(outcomes) - num_left - 1


RANKS = (
    RankReport(
        rank=0,
        host="10.0.0.1",
        pid=71,
        state="sleeping",
        doing=(("update()", 2.5),),
        waits=True,
        top="all_reduce (c10d.py:9)",
        stacks="Thread 1: all_reduce",
        log_tail="a last word\n",
        memory=((1.5, 1000, 10), (0.5, 2000, 20)),
    ),
    RankReport(rank=1, host="10.0.0.2", pid=72, state="gone", exit="killed by signal 9 (SIGKILL)"),
)


def _raised() -> WorkerDiedError:
    try:
        raise _died()
    except WorkerDiedError as error:
        return error


def _write(folder: Path, *, limit_s: float = 5.0) -> str:
    error = _raised()
    attach_reports(error, RANKS)
    return write_postmortem(folder, error, where="in step 12 of 30, update", limit_s=limit_s)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("mode: train\n")
    (tmp_path / "log.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(100)))
    return tmp_path


def test_a_post_mortem_holds_what_was_known(run_folder: Path) -> None:
    folder = Path(_write(run_folder))
    assert folder.parent == run_folder / "postmortem"
    text = {path.name: path.read_text() for path in folder.iterdir()}
    what = text["what.txt"]
    assert "WorkerDiedError: rank 1 on 10.0.0.2: update() failed: killed" in what
    assert "in step 12 of 30, update\n" in what
    assert "restartable: yes" in what
    assert "rank 1 (10.0.0.2, pid 72, gone: killed by signal 9 (SIGKILL)): idle" in what
    assert "in _raised" in what  # the traceback
    assert "Thread 1: all_reduce" in text["stacks.txt"]
    assert "in _own_stacks" in text["stacks.txt"]  # the driver's
    assert "line 999\n" in text["log_tail.txt"]
    assert "line 700\n" not in text["log_tail.txt"]
    assert "a last word\n" in text["log_tail.txt"]
    assert text["config.yaml"] == "mode: train\n"
    assert text["metrics_tail.jsonl"].splitlines()[-1] == '{"step": 99}'
    assert f"hybridrl {hybridrl.__version__}\n" in text["versions.txt"]
    assert "\ntorch 2." in text["versions.txt"]
    rows = list(csv.reader(text["memory.csv"].splitlines()))
    assert rows[2:] == [
        ["rank 0", "10.0.0.1", "-1.5", "1000", "10"],
        ["rank 0", "10.0.0.1", "-0.5", "2000", "20"],
    ]


def test_crashes_of_the_same_second_do_not_overwrite_each_other(run_folder: Path) -> None:
    folders = {_write(run_folder) for _ in range(3)}
    assert {str(path) for path in (run_folder / "postmortem").iterdir()} == folders
    assert len(folders) == 3


@pytest.mark.shows("R7.5")
def test_a_post_mortem_that_cannot_be_written_is_told_and_half_of_one_is_none(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _full_disk)  # the disk of a test cannot be filled
    outcome = _write(run_folder)
    assert outcome == "not written, [Errno 28] No space left on device"
    assert list((run_folder / "postmortem").iterdir()) == []
    monkeypatch.undo()
    (run_folder / "postmortem").rmdir()
    (run_folder / "postmortem").write_text("a file is in the way")
    outcome = _write(run_folder)
    assert outcome.startswith("not written, ")
    assert (run_folder / "postmortem").read_text() == "a file is in the way"


def _full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.shows("R7.5")
def test_a_disk_that_hangs_costs_the_time_given_and_no_more(run_folder: Path) -> None:
    (run_folder / "config.yaml").unlink()
    os.mkfifo(run_folder / "config.yaml")  # whoever reads it waits for a writer
    outcome = _write(run_folder, limit_s=0.2)
    assert "did not take it within 0.2 s" in outcome
    os.close(os.open(run_folder / "config.yaml", os.O_RDWR))  # let the thread go


def test_reports_of_all_groups_stay_on_an_error() -> None:
    error = _died()
    for rank in RANKS:  # of two groups
        attach_reports(error, [rank])
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert reports_on(one) == RANKS
    try:
        raise ValueError from error
    except ValueError as another:
        assert reports_on(another) == RANKS


def test_each_error_is_explained_with_its_own_ranks(tmp_path: Path) -> None:
    with open_record(small_config(tmp_path / "run"), resolved_yaml="") as record:
        record.live.begin_step(1)
        record.live.phase("generate")
        tails = []
        for ranks in (RANKS, ()):
            error = _died()
            attach_reports(error, ranks)
            record.explain(error)
            where, post_mortem = error.__notes__
            assert where.startswith("in step 1 of 3, generate, ")
            folder = Path(post_mortem.removeprefix("post-mortem: "))
            tails.append("a last word" in (folder / "log_tail.txt").read_text())
    assert tails == [True, False]


def test_a_resumed_run_names_its_step_before_it_begins_and_its_log_the_post_mortem(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run")
    with open_record(config, resolved_yaml="") as record:
        for step in (1, 2):
            record.live.begin_step(step)
            record.record(step, {})
    with (
        pytest.raises(ZeroDivisionError) as caught,
        open_record(config, resolved_yaml="", resumes=True) as record,
    ):
        record.live.phase("start workers")
        raise ZeroDivisionError
    where, post_mortem = caught.value.__notes__
    assert where.startswith("before step 3 of 3, start workers, ")
    assert post_mortem.startswith(f"post-mortem: {tmp_path / 'run'}")
    assert post_mortem in (tmp_path / "run" / "log.txt").read_text()


def test_a_stopped_start_or_a_refusal_that_says_it_all_leaves_no_post_mortem(
    tmp_path: Path,
) -> None:
    for name, has_begun in (("start", False), ("step", True)):
        with (
            pytest.raises(RunInterrupted),
            open_record(small_config(tmp_path / name), resolved_yaml="") as record,
        ):
            record.live.phase("start workers")
            if has_begun:
                record.live.begin_step(1)
            raise RunInterrupted(signal.SIGINT)
        assert (tmp_path / name / "postmortem").exists() == has_begun
    refusal = ConfigError("a.b", 1, rule="must be 2", fix="set a.b=2")
    with pytest.raises(ConfigError), open_record(small_config(tmp_path / "run"), resolved_yaml=""):
        raise refusal
    assert not (tmp_path / "run" / "postmortem").exists()
