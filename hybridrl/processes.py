"""Processes that belong together: those of one session, which end together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hybridrl.activity import process_stat

_KILL_WAIT_S = 10.0
_POLL_S = 0.02


def members_of(session: int) -> list[int]:
    """Return the living processes of a session, its leader first."""
    pids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _lives_in(session, process_stat(pid))]


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a session, and all processes in it, as a loss of power does.

    Twice is a no-op. The child's exit status stays with ``leader``.
    """
    deadline = time.monotonic() + _KILL_WAIT_S
    while (members := members_of(leader.pid)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()  # what is dead and not asked for stays in the list
        time.sleep(_POLL_S)


def _lives_in(session: int, stat: Sequence[str]) -> bool:
    if not stat:  # it ended meanwhile
        return False
    state, _, _, its_session = stat[:4]
    return int(its_session) == session and state != "Z"
