"""Commands that end with all processes that they started, on Linux.

This file is also the guard itself, a script: ``python guard.py COMMAND...``. It runs without other
modules of hybridrl. It adopts the orphans of the command. So a process that left its session
(``setsid``) or its parents (a daemon) stays below it. When the command ends, or standard input
closes because the process at the other end is gone, it kills all processes below it. Then it ends
with the status of the command.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SHARED = "/dev/shm/sglang_loads_"
_STDIN = 0
_KILL_WAIT_S, _GUARD_WAIT_S = 10.0, 15.0
_POLL_S = 0.01


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command line that runs ``command`` and leaves no process behind, however it ends.

    Start it with a pipe as its standard input, in a session of its own; end it with `end_guarded`.
    Its exit status is the command's.
    """
    return [sys.executable, "-S", "-E", "-P", __file__, *command]


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


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a child that is a session leader, and all processes in it, as a loss of power does.

    Twice is a no-op. The child's exit status stays with ``leader``.
    """
    _kill(lambda: members_of(leader.pid), reap=leader.poll)


def members_of(session: int) -> list[int]:
    """Return the living processes of a session, its session leader first."""
    stats = {pid: process_stat(pid)[1] for pid in sorted(_pids())}
    living = {pid: int(stat[3]) for pid, stat in stats.items() if stat[0] != "Z"}
    return [pid for pid, its_session in living.items() if its_session == session]


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all() -> None:
    """Kill all processes below this one, and those that they start meanwhile."""

    def reap() -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    _kill(descendants, reap=reap)


def descendants() -> list[int]:
    """Return the processes below this one, with zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        children[int(process_stat(pid)[1][1])].append(pid)
    below = list(children[os.getpid()])
    for pid in below:
        below += children[pid]
    return below


def process_name(pid: int) -> str:
    """Return the name of a living process, at most 15 characters; empty of a dead one."""
    name, (state, *_) = process_stat(pid)
    return "" if state in "ZX" else name


def usual_num_processes() -> int:
    """Return the cores that this process may use, 16 at most."""
    return min(len(os.sched_getaffinity(0)), 16)


def main(command: list[str]) -> None:
    """Be the guard: run ``command`` to its end, or to the end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Meant for the command. Handlers, unlike SIG_IGN, are not inherited by it.
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    child = subprocess.Popen(
        command,
        close_fds=False,  # this process inherits files for the command
        # If this process is killed, at least the command ends.
        preexec_fn=lambda: prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    _wait(child.pid)
    status = -signal.SIGKILL if child.poll() is None else child.returncode
    left = _shared_files()
    kill_all()
    for file in left:
        file.unlink(missing_ok=True)
    if status < 0:  # end by the same signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _wait(pid: int) -> None:
    """Return when process ``pid`` has ended, or standard input."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (_STDIN, ended):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if ended in ready or not os.read(_STDIN, 1):
            return


def _kill(members: Callable[[], list[int]], *, reap: Callable[[], object]) -> None:
    """Kill until there are no members, for some seconds at most."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while (pids := members()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()  # a dead process whose status was not read stays in the list
        time.sleep(_POLL_S)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def process_stat(pid: int) -> tuple[str, list[str]]:
    """Return a process's name, and the fields of /proc/PID/stat behind it, from the state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended meanwhile
        return "", ["X", *["0"] * 19]
    name, _, fields = text.rpartition(")")  # the name in parentheses may hold anything
    return name.partition("(")[2], fields.split()


def _shared_files() -> set[Path]:
    """Return SGLang's files in shared memory that processes below this one have; it leaves them."""
    files: set[Path] = set()
    for pid in descendants():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        files |= {Path(line.split()[5]) for line in maps.splitlines() if _SHARED in line}
    return files


if __name__ == "__main__":
    main(sys.argv[1:])
