"""Waiting for what another process does: for a condition and never for a time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

_POLL_S = 0.02


def wait_until(
    condition: Callable[[], object],
    *,
    deadline_s: float = 60.0,
    process: subprocess.Popen[Any] | None = None,
) -> None:
    """Return once ``condition()`` is true; the end of ``process`` makes waiting pointless."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(
                f"the process ended with {process.poll()}: {process.communicate()}"
            )
        assert time.monotonic() < deadline, f"not within {deadline_s} s"
        time.sleep(_POLL_S)


def wait_until_gone(pids: Iterable[int]) -> None:
    pids = list(pids)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
