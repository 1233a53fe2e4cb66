"""Children with foreign code that forks, hangs, writes where it must not, or is killed.

Rewards, tools, environments and encoders are such children, so what holds here holds for each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from hybridrl.processes.pool import (
    CallFailed,
    CallHung,
    CallKilled,
    Child,
    LoadFailed,
    Pool,
    Refused,
)
from tests.waiting import wait_until, wait_until_gone

Open = Callable[..., Child]
HEAD = """
import os, signal, struct, subprocess, sys, time
NOTES = {notes!r}

def frame(data):
    return struct.pack('!Q', len(data)) + data

def write(data):
    os.write(int(sys.argv[-1]), data)

def answer(value):
"""


def child_of(folder: Path, body: str, *, timeout_s: float = 20.0) -> Child:
    """Return a child that is not started, whose ``answer`` has this body."""
    path = folder / "own.py"
    body = textwrap.indent(textwrap.dedent(body), "    ")
    path.write_text(HEAD.format(notes=str(folder)) + body)
    return Child(
        "tests.processes.answers",
        {"path": str(path)},
        names=["key=own.py:answer"],
        timeout_s=timeout_s,
    )


def call(child: Child, value: object = "", *, max_bytes: int = 1 << 16) -> object:
    child.start()
    with child.call({"value": value}, max_bytes=max_bytes) as next_answer:
        return next_answer()["value"]


@pytest.fixture
def open_child(tmp_path: Path) -> Iterator[Open]:
    opened: list[Child] = []

    def open_one(body: str, **others: float) -> Child:
        opened.append(child_of(tmp_path, body, **others))
        return opened[-1]

    yield open_one
    for child in opened:
        child.close()


@pytest.mark.shows("R5.1")
def test_answers_of_a_forked_copy_are_never_taken(open_child: Open) -> None:
    child = open_child(
        """
        if os.fork() == 0:
            return "copy"
        time.sleep(0.2)  # the copy would answer first
        return value
        """
    )
    assert [call(child, number) for number in range(3)] == [0, 1, 2]


@pytest.mark.shows("R5.1")
def test_a_late_answer_does_not_count_for_the_next_call(open_child: Open) -> None:
    # What a copy that lives on in a thread would send: a whole answer, once more.
    child = open_child(
        """
        if value != 1:
            write(frame(b'{"call": 1, "value": "late"}'))
        return value
        """
    )
    assert [call(child, number) for number in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.shows("R5.2")
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("struct.pack('!Q', 1 << 60)", "answered with 1152921504606846976 bytes, more than"),
        ("frame(b'hello')", "text that is not JSON"),
        ("frame(b'[' * 60000)", "text that is not JSON"),
        ("frame(b'[]')", "text that is not an answer to a call"),
        ("frame(b'{\"call\": 7}')", "text that is not an answer to a call"),
    ],
)
def test_garbage_on_the_socket_costs_the_call_and_not_the_next(
    open_child: Open, sent: str, words: str
) -> None:
    child = open_child(
        f"""
        if value == "write":
            write({sent})
        return 1.0
        """
    )
    with pytest.raises(CallFailed, match=words):
        call(child, "write")
    assert call(child, "no more") == 1.0


@pytest.mark.shows("R5.2")
@pytest.mark.parametrize(
    "body",
    [
        'write(struct.pack("!Q", 100) + b"{")\ntime.sleep(600)',
        # A backtracking regular expression holds the GIL: no thread of the process can run.
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "signal.pause()",
    ],
    ids=["half an answer", "holds the interpreter", "waits"],
)
def test_a_call_without_an_end_is_ended(open_child: Open, body: str) -> None:
    child = open_child(body, timeout_s=0.5)
    with pytest.raises(CallHung, match=r"took longer than 0\.5 s"):
        call(child)


def test_a_process_that_does_not_read_its_input_is_ended(open_child: Open) -> None:
    child = open_child("return os.getpid()", timeout_s=0.5)
    process = psutil.Process(int(str(call(child))))
    process.suspend()
    with pytest.raises(CallHung, match=r"did not read its input within 0\.5 s"):
        call(child, "a" * 2_000_000)
    assert not process.is_running()


@pytest.mark.shows("R5.2")
def test_what_a_child_sends_is_never_unpickled(open_child: Open, tmp_path: Path) -> None:
    child = open_child(
        """
        import pickle
        class Trap:
            def __reduce__(self):
                return os.mkdir, (NOTES + "/sprung",)
        data = pickle.dumps(Trap())
        write(struct.pack("!i", len(data)) + data)
        return 1.0
        """,
        timeout_s=2.0,
    )
    with pytest.raises(CallFailed):
        call(child)
    assert not (tmp_path / "sprung").exists()


def test_non_finite_numbers_and_broken_text_pass_through(open_child: Open) -> None:
    child = open_child("return [float('nan'), float('-inf'), 1e39, len(value)]")
    values = call(child, "a\ud800b")
    assert str(values) == "[nan, -inf, 1e+39, 3]"


def test_an_error_is_named_with_its_line_and_costs_its_call_alone(open_child: Open) -> None:
    child = open_child(
        """
        if value == "raise":
            raise ValueError("no such city: \\ud800")
        if value == "exit":
            sys.exit(1)
        if value == "read":
            return __import__("json").loads("no")
        return os.getpid()
        """
    )
    pid = call(child)
    with pytest.raises(Refused, match=r"^raised ValueError: no such city: \? \(own\.py:14\)$"):
        call(child, "raise")
    with pytest.raises(Refused, match=r"raised JSONDecodeError.*\(own\.py:18\)$"):
        call(child, "read")
    with pytest.raises(Refused, match=r"raised SystemExit: 1 \(own\.py:"):
        call(child, "exit")
    assert call(child) == pid


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        ("os._exit(3)", CallFailed, "ended its process, exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", CallFailed, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGTERM)", CallKilled, "was killed by SIGTERM"),
    ],
)
def test_the_end_of_a_process_is_named_and_the_next_call_has_another(
    open_child: Open, end: str, kind: type[Exception], words: str
) -> None:
    child = open_child(f"if value:\n    {end}\nreturn os.getpid()")
    pid = call(child)
    with pytest.raises(CallFailed, match=words) as caught:
        call(child, "end")
    assert caught.type is kind
    assert call(child) != pid


@pytest.mark.shows("R5.3")
def test_a_process_killed_between_calls_is_started_again(
    open_child: Open, caplog: pytest.LogCaptureFixture
) -> None:
    child = open_child("return [os.getpid(), os.getppid()]")
    process, guard = map(psutil.Process, call(child))  # type: ignore[call-overload]
    process.kill()
    wait_until(lambda: guard.status() == psutil.STATUS_ZOMBIE)
    with caplog.at_level(logging.WARNING, logger="hybridrl"):
        assert call(child) != [process.pid, guard.pid]
    [message] = caplog.messages
    assert "key=own.py:answer was killed by SIGKILL between calls; it is started" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def other(value): ...\n", "AttributeError: no function 'answer' in .*other"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def answer(:\n", "SyntaxError"),
        ("import os; os._exit(4)\n", "ended its process, exit code 4"),
        ("import sys; sys.exit(5)\n", "SystemExit: 5"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_at_once(
    tmp_path: Path, text: str, reason: str
) -> None:
    child = child_of(tmp_path, "return 1")
    (tmp_path / "own.py").write_text(text)
    with (
        closing(child),
        pytest.raises(LoadFailed, match=rf"own\.py:answer cannot be (.|\n)*{reason}"),
    ):
        child.start()


def test_what_is_printed_is_no_answer(open_child: Open, capfd: pytest.CaptureFixture[str]) -> None:
    child = open_child("print('printed', flush=True)\nreturn sys.stdin.read()")
    assert call(child) == ""
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "printed\n")


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
    open_child: Open, tmp_path: Path, end: str
) -> None:
    if end == "driver":
        _run_in_a_driver_that_is_killed(tmp_path, _DAEMON + "time.sleep(60)")
    else:
        child = open_child(_DAEMON + "return os.getpid()")
        pid = int(str(call(child)))
        assert psutil.pid_exists(_read_pid(tmp_path))
        if end == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            child.close()
            child.close()
    wait_until_gone([_read_pid(tmp_path)])


@pytest.mark.shows("R5.4")
def test_a_function_holding_the_interpreter_ends_with_the_driver(tmp_path: Path) -> None:
    note = "open(NOTES + '/pid', 'w').write(f'{os.getpid()}\\n')\n"
    # Holds the lock of the interpreter: no thread of the process can look whether to go on.
    hang = "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"
    _run_in_a_driver_that_is_killed(tmp_path, note + hang)
    wait_until_gone([_read_pid(tmp_path)])


def test_time_in_which_the_driver_was_stopped_does_not_count(tmp_path: Path) -> None:
    # It still runs when the driver goes on: an answer that lies ready would be taken in any case.
    body = "open(NOTES + '/pid', 'w').write('began\\n')\ntime.sleep(4.0)\nreturn 2.0"
    with _driver(tmp_path, body, timeout_s=2.5) as driver:
        driver.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
        time.sleep(3.0)
        driver.send_signal(signal.SIGCONT)
        assert driver.communicate(timeout=60)[0] == "2.0\n"


def _run_in_a_driver_that_is_killed(folder: Path, body: str) -> None:
    """Kill a driver whose child hangs, once the child has written its file ``pid``."""
    with _driver(folder, body, timeout_s=600.0) as driver:
        driver.kill()


def _driver(folder: Path, body: str, *, timeout_s: float) -> subprocess.Popen[str]:
    """Start a process that calls a child, and return once the child has written ``pid``."""
    program = (
        "from pathlib import Path\n"
        "from tests.processes.test_pool import call, child_of\n"
        f"child = child_of(Path({str(folder)!r}), {body!r}, timeout_s={timeout_s})\n"
        "print(call(child))\nchild.close()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid_file = folder / "pid"
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    except BaseException:
        driver.kill()
        raise
    return driver


def _is_dead(pid: int) -> bool:
    """Whether a process has ended; its guard reads the status of orphans at the end alone."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _read_pid(folder: Path) -> int:
    return int((folder / "pid").read_text())


def test_copies_have_a_state_of_their_own_and_end_with_their_groups(
    open_child: Open, tmp_path: Path
) -> None:
    child = open_child(
        """
        global state
        if value == "get":
            return state
        if value == "hang":
            sleeper = subprocess.Popen(["sleep", "600"])
            open(NOTES + "/pid", "w").write(f"{sleeper.pid}")
            time.sleep(600)
        if value == "fork":
            os.fork()
        state = value
        return os.getpid()
        """,
        timeout_s=5.0,
    )
    child.start()

    async def ask_copies() -> None:
        one, other = child.fork(), child.fork()
        ask_one, ask_other = (partial(copy.call, max_bytes=1 << 10) for copy in (one, other))
        pids = [(await ask({"value": n}))["value"] for n, ask in enumerate((ask_one, ask_other))]
        assert len({*pids}) == 2
        assert [(await ask({"value": "get"}))["value"] for ask in (ask_one, ask_other)] == [0, 1]
        assert (await ask_one({"value": "fork"}))["value"] == pids[0]
        assert (await ask_one({"value": "get"}))["value"] == "fork"
        with pytest.raises(CallHung, match="took longer than 5 s"):
            await ask_other({"value": "hang"})
        wait_until_gone([pids[1]])
        wait_until(lambda: _is_dead(_read_pid(tmp_path)))
        with pytest.raises(CallFailed, match="ended its process"):
            await ask_other({"value": "get"})
        with pytest.raises(CallFailed, match=r"answered with \d+ bytes, more than 1024"):
            await ask_one({"value": "x" * 2000})
            await ask_one({"value": "get"})
        one.end()
        wait_until_gone(pids)

    asyncio.run(ask_copies())
    assert isinstance(call(child), int)  # the process itself goes on


@pytest.mark.shows("R5.4")
def test_a_pool_leaves_no_process_even_if_a_call_is_under_way(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    body = "open(f'{NOTES}/{value}', 'w').close()\ntime.sleep(600)"
    pool = Pool([child_of(tmp_path, body, timeout_s=500.0) for _ in range(2)], name="test")
    for start in pool.start():
        start.result()
    calls = [pool.submit(partial(call, value=f"began {number}")) for number in range(3)]
    wait_until(lambda: len([*tmp_path.glob("began*")]) == 2)
    closing_thread = threading.Thread(target=pool.close)
    closing_thread.start()
    closing_thread.join(60)
    assert all(under_way.done() for under_way in calls)
    assert {*psutil.Process().children(recursive=True)} <= before
