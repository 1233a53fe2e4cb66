"""What becomes of a run whose driver ends without a word; the driver here is a few lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from hybridrl.errors import HybridRLError, RewardError, WorkerDiedError
from hybridrl.run.launch import with_restarts
from tests.composing import composed
from tests.end_to_end.small import SMALL

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
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
    "death",
    [
        pytest.param("os._exit(1)", marks=pytest.mark.nightly),
        "os.kill(os.getpid(), 9)",
    ],
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


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("raise ValueError", 1)])
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
        *((number, "parent") for number in (signal.SIGTERM, signal.SIGHUP)),
        pytest.param(signal.SIGINT, "parent", marks=pytest.mark.nightly),
        (signal.SIGINT, "both"),  # as Ctrl-C in a terminal
        pytest.param(signal.SIGTERM, "both", marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, "both", marks=pytest.mark.nightly),
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
        *((act, "gone without a word\n") for act in ("os._exit(1)", "os.kill(os.getpid(), 9)")),
        *((act, None) for act in ("pass", "sys.exit(3)", "raise ValueError('known')")),
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
    return WorkerDiedError(rank=1, host="h", method="update", cause="killed", traceback="")


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
            attempt,
            explain=explained.append,
            newest_step=lambda: step,
            max_in_a_row=max_in_a_row,
        )
    assert len(remaining) == num_left
    assert len(explained) == len(outcomes) - num_left - 1
