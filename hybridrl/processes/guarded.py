"""Processes that must end together: those of a session, or below a guard."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hybridrl.diagnostics.activity import process_stat
from hybridrl.json_text import to_json_text
from hybridrl.processes import guard

log = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_KILL_WAIT_S = 10.0
_POLL_S = 0.02
_GUARD_WAIT_S = 15.0


def usual_num_processes() -> int:
    """Return the cores that this process may use, 16 at most."""
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


def members_of(session: int) -> list[int]:
    """Return the living processes of a session, its session leader first."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _lives_in(session, process_stat(pid))]


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a child that is a session leader, and all processes in it, as a loss of power does.

    Twice is a no-op. The child's exit status stays with ``leader``.
    """
    deadline = time.monotonic() + _KILL_WAIT_S
    while (members := members_of(leader.pid)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()  # a dead process whose status was not read stays in the list
        time.sleep(_POLL_S)


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command line that runs ``command`` and leaves no process behind, however it ends.

    Start it with a pipe as its standard input, in a session of its own; end it with `end_guarded`.
    Its exit status is the command's.
    """
    return [sys.executable, "-S", "-E", guard.__file__, *command]


def start_guarded_module(module: str, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process that calls ``main(descriptor)`` of a module; end it with `end_guarded`.

    It has this process's search path, and inherits the open file ``descriptor``.
    """
    search_path = to_json_text([entry for entry in sys.path if isinstance(entry, str)])
    # The search path comes first: only with it can the process import this package.
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import main; main(int(sys.argv[2]))"
    )
    # -P: the working folder must not hide modules of the standard library.
    command = [sys.executable, "-P", "-c", program, search_path, str(descriptor)]
    return subprocess.Popen(
        guarded(command),
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def end_guarded(process: subprocess.Popen[bytes]) -> None:
    """Kill a guarded command and all processes that it started, in any session. Twice is a no-op.

    The exit status stays with ``process``.
    """
    if process.stdin is not None:
        process.stdin.close()  # the guard waits for this
    try:
        process.wait(_GUARD_WAIT_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d did not end what is below it", process.pid)
    kill_session(process)  # if the guard itself was killed
    process.wait()


def _lives_in(session: int, stat: Sequence[str]) -> bool:
    if not stat:  # it ended meanwhile
        return False
    state, _, _, its_session = stat[:4]
    return int(its_session) == session and state != "Z"
