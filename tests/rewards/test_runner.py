"""The process of a reward function when that forks, writes where it must not, or is killed."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hybridrl.rewards.runner import (
    CallFailed,
    CallHung,
    CallKilled,
    ChildRunner,
    FunctionFile,
    RewardInputs,
)
from tests.waiting import wait_until

Open = Callable[..., ChildRunner]


def inputs(*responses: str) -> RewardInputs:
    columns = [""] * len(responses)
    return RewardInputs(
        responses=list(responses),
        answers=columns,
        prompts=columns,
        sources=columns,
        lengths=[1] * len(responses),
    )


def runner_of(path: Path, *, timeout_s: float) -> ChildRunner:
    function = FunctionFile(path=path, name="reward", args={})
    return ChildRunner([function], timeout_s=timeout_s)


def call(runner: ChildRunner, *responses: str) -> Sequence[float | str]:
    return runner.call(inputs(*responses))


@pytest.fixture
def open_runner(tmp_path: Path) -> Iterator[Open]:
    """Write the body of a reward function to a file, and load it."""
    opened: list[ChildRunner] = []

    def open_one(body: str, *, timeout_s: float = 20.0) -> ChildRunner:
        path = tmp_path / "reward.py"
        path.write_text(
            "import os, signal, struct, subprocess, sys, time\n"
            f"NOTES = {str(tmp_path)!r}\n"
            "frame = lambda data: struct.pack('!Q', len(data)) + data\n\n\n"
            "def reward(responses, **_):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        )
        opened.append(runner_of(path, timeout_s=timeout_s))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()


@pytest.mark.shows("R5.1")
def test_rewards_of_a_forked_copy_are_never_taken(open_runner: Open) -> None:
    runner = open_runner(
        """
        if os.fork() == 0:
            return [-1.0]
        time.sleep(0.2)  # the copy would answer first
        return [float(text) for text in responses]
        """
    )
    assert [call(runner, str(number)) for number in range(3)] == [[0.0], [1.0], [2.0]]


@pytest.mark.shows("R5.1")
def test_late_answer_does_not_count_for_the_next_call(open_runner: Open) -> None:
    # What a copy that lives on in a thread would send: a whole answer, once more.
    runner = open_runner(
        """
        text = b'{"call": 1, "rewards": [-1.0]}'
        if responses != ["1"]:
            os.write(int(sys.argv[1]), struct.pack("!Q", len(text)) + text)
        return [float(text) for text in responses]
        """
    )
    assert [call(runner, str(number)) for number in (1, 2, 3)] == [[1.0], [2.0], [3.0]]


@pytest.mark.shows("R5.2")
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("struct.pack('!Q', 1 << 60)", "answered with 1152921504606846976 bytes, more than"),
        ("frame(b'hello')", "text that is not JSON"),
        ("frame(b'[' * 60000)", "text that is not JSON"),
        ("frame(b'[]')", "text that is not an answer to a call"),
        ("frame(b'{\"call\": 7}')", "text that is not an answer to a call"),
        ("frame(b'{\"call\": 1}')", "not a list of rewards"),
        ('frame(b\'{"call": 1, "rewards": [true]}\')', "not a list of rewards"),
    ],
)
def test_garbage_on_the_socket_costs_the_call_and_not_the_next(
    open_runner: Open, sent: str, words: str
) -> None:
    runner = open_runner(
        f"""
        if responses == ["write"]:
            os.write(int(sys.argv[1]), {sent})
        return [1.0]
        """
    )
    with pytest.raises(CallFailed, match=words):
        call(runner, "write")
    assert call(runner, "no more") == [1.0]


@pytest.mark.shows("R5.2")
def test_half_an_answer_times_out(open_runner: Open) -> None:
    runner = open_runner(
        """
        os.write(int(sys.argv[1]), struct.pack("!Q", 100) + b"{")
        time.sleep(600)
        """,
        timeout_s=0.5,
    )
    with pytest.raises(CallHung, match=r"took longer than 0\.5 s"):
        call(runner, "a")


def test_non_finite_numbers_and_broken_text_pass_through(open_runner: Open) -> None:
    runner = open_runner("return [float('nan'), float('-inf'), 1e39, len(responses[3])]")
    first, *others = call(runner, "", "", "", "a\ud800b")
    assert isinstance(first, float)
    assert math.isnan(first)
    assert others == [-math.inf, 1e39, 3.0]


@pytest.mark.shows("R5.2")
def test_what_is_sent_to_the_driver_is_never_unpickled(open_runner: Open, tmp_path: Path) -> None:
    runner = open_runner(
        """
        import pickle
        class Trap:
            def __reduce__(self):
                return os.mkdir, (NOTES + "/sprung",)
        data = pickle.dumps(Trap())
        os.write(int(sys.argv[1]), struct.pack("!i", len(data)) + data)
        return [1.0]
        """,
        timeout_s=2.0,
    )
    with pytest.raises(CallFailed):
        call(runner, "a")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.shows("R5.3")
def test_a_process_killed_during_a_call_is_asked_again_and_named(
    open_runner: Open, caplog: pytest.LogCaptureFixture
) -> None:
    runner = open_runner(
        """
        if not os.path.exists(NOTES + "/once"):
            open(NOTES + "/once", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0]
        """
    )
    with caplog.at_level(logging.WARNING, logger="hybridrl"):
        assert call(runner, "a") == [1.0]
    [message] = caplog.messages
    assert "reward.py:reward was killed by SIGKILL during a call" in message
    assert "started again (1 of 2)" in message


@pytest.mark.shows("R5.3")
def test_a_process_that_is_always_killed_is_given_up(open_runner: Open, tmp_path: Path) -> None:
    runner = open_runner(
        """
        open(NOTES + "/calls", "a").write(".")
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    with pytest.raises(CallKilled, match="was killed by SIGTERM"):
        call(runner, "a")
    assert (tmp_path / "calls").read_text() == "..."


@pytest.mark.shows("R5.3")
def test_restarts_do_not_prolong_the_deadline(open_runner: Open, tmp_path: Path) -> None:
    runner = open_runner(
        """
        open(NOTES + "/calls", "a").write(".")
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        timeout_s=1.0,
    )
    with pytest.raises(CallHung, match="took longer than 1 s"):
        call(runner, "a")
    assert len((tmp_path / "calls").read_text()) <= 2  # at the third death it would be given up


_DAEMON = """
code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
# No environment, no session and, once its parent has ended, no parent in common.
shell = f"env -i {sys.executable} -c '{code}' > {NOTES}/pid & exit 0"
subprocess.run(["sh", "-c", shell], check=True)
while not os.path.exists(NOTES + "/pid") or not os.path.getsize(NOTES + "/pid"):
    time.sleep(0.01)
"""


@pytest.mark.shows("R5.4")
@pytest.mark.parametrize("end", ["close", "kill", "driver"])
def test_a_daemon_that_left_session_and_parents_ends_too(
    open_runner: Open, tmp_path: Path, end: str
) -> None:
    if end == "driver":
        _run_in_a_driver_that_is_killed(tmp_path)
    else:
        runner = open_runner(_DAEMON + "return [float(os.getpid())]")
        [pid] = call(runner, "a")
        assert psutil.pid_exists(_read_pid(tmp_path))
        if end == "kill":
            os.kill(int(pid), signal.SIGKILL)
        else:
            runner.close()
    wait_until(lambda: not psutil.pid_exists(_read_pid(tmp_path)))


@pytest.mark.shows("R5.4")
def test_function_holding_the_interpreter_ends_with_the_driver(tmp_path: Path) -> None:
    hang = f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
    # Holds the lock of the interpreter: no thread of the process can look whether to go on.
    _run_in_a_driver_that_is_killed(
        tmp_path, hang + "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"
    )
    wait_until(lambda: not psutil.pid_exists(_read_pid(tmp_path)))


def _run_in_a_driver_that_is_killed(folder: Path, body: str = "") -> None:
    """Kill a driver whose reward function hangs, once the function has written its file ``pid``."""
    body = body or _DAEMON + "time.sleep(60)"
    path = folder / "hang.py"
    path.write_text(
        f"import os, subprocess, sys, time\nNOTES = {str(folder)!r}\n"
        "def reward(responses, **_):\n" + textwrap.indent(body, "    ")
    )
    program = (
        "from pathlib import Path\n"
        "from tests.rewards.test_runner import call, runner_of\n"
        f"call(runner_of(Path({str(path)!r}), timeout_s=600.0), 'a')\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as driver:
        try:
            pid_file = folder / "pid"
            wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        finally:
            driver.kill()


def _read_pid(folder: Path) -> int:
    return int((folder / "pid").read_text())


def test_a_function_may_ask_for_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward(conversation, response):\n"
        "    return len(conversation) + (conversation[-1]['text'] == response)\n"
    )
    runner = runner_of(path, timeout_s=20.0)
    said = [[{"role": "assistant", "text": "x"}, {"role": "tool", "text": "7"}]]
    try:
        assert runner.call(replace(inputs("7"), conversations=said)) == [3.0]
        assert call(runner, "a", "b") == [2.0, 2.0]  # single turns are conversations, too
    finally:
        runner.close()
