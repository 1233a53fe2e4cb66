"""Run a command and kill all its processes at the end: ``python guard.py COMMAND...``, on Linux.

A script of its own, without imports of hybridrl. It adopts the orphans of the command. So a process
that left its session (``setsid``) or its parents (a daemon) stays below it. When the command ends,
or standard input closes because the process at the other end is gone, it kills all processes below
it. Then it ends with the status of the command.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SHARED = "/dev/shm/sglang_loads_"
_STDIN = 0
_WAIT_S = 10.0
_POLL_S = 0.01


def main(command: list[str]) -> None:
    """Run ``command`` to its end, or to the end of standard input."""
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
    status = child.poll()
    left = shared_files()
    kill_all()
    for file in left:
        file.unlink(missing_ok=True)
    _end_as(-signal.SIGKILL if status is None else status)


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


def kill_all() -> None:
    """Kill all processes below this one, and those that they start meanwhile."""
    deadline = time.monotonic() + _WAIT_S
    while (below := descendants()) and time.monotonic() < deadline:
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        _reap()
        time.sleep(_POLL_S)


def descendants() -> list[int]:
    """Return the processes below this one, with zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; the parent comes second after it.
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        children[parent].append(int(path.parent.name))
    below = list(children[os.getpid()])
    for pid in below:
        below += children[pid]
    return below


def shared_files() -> set[Path]:
    """Return SGLang's files in shared memory that processes below this one have; it leaves them."""
    files: set[Path] = set()
    for pid in descendants():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        files |= {Path(line.split()[5]) for line in maps.splitlines() if _SHARED in line}
    return files


def process_name(pid: int) -> str:
    """Return the name of a living process, at most 15 characters; empty of a dead one."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return ""
    return "" if fields.split()[0] in "ZX" else name.partition("(")[2]


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _end_as(status: int) -> None:
    """End with an exit status, or by the signal that a negative one stands for."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
