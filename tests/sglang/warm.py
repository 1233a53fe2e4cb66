"""Servers of SGLang forked from a process that has imported it; see `tests/warm_workers`.

This program takes the place of `hybridrl/workers/rollout/sglang/child.py`: it has a server forked,
and stays until that has ended. The server is not below it, but is found by its name, and ends with
it. One with other variables is started as without this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from tests.warm_workers.set_up import forked

CHILD = "hybridrl.workers.rollout.sglang.child"
PRELOADED = (("torch", "setproctitle"), ("tests.sglang.preloaded",))
SOCKET = "HYBRIDRL_TESTS_WARM_SERVERS"
"""Variable that holds the name of the socket of the server that forks."""

_NAME = "warm "
"""Begins the name of this process, which ends with the number of the server's."""


def below(pid: int) -> list[psutil.Process]:
    """The living processes below one, and those of servers that it has had forked."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it has just ended
        found = psutil.Process(pid).children(recursive=True)
    for process in found:
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(_NAME):
                server = psutil.Process(int(process.name().removeprefix(_NAME)))
                found += [server, *server.children(recursive=True)]
    return found


def _call_myself(pid: int) -> None:
    Path("/proc/self/comm").write_text(f"{_NAME}{pid}")


def main(arguments: list[str]) -> NoReturn:
    """Have a server forked, whose standard input ends with this process, and so it does."""
    read, _ = os.pipe()
    status = forked(SOCKET, [CHILD, *arguments], dict(os.environ), stdin=read, begun=_call_myself)
    if status is None:
        os.execv(sys.executable, [sys.executable, "-m", CHILD, *arguments])
    sys.exit(status)


def run_forked(module: str, *files: Path, variables: Mapping[str, str]) -> None:
    """Run a module in a process that has imported SGLang, and wait until it has ended well."""
    command = [module, *map(str, files)]
    assert forked(SOCKET, command, os.environ | variables) == 0


if __name__ == "__main__":
    main(sys.argv[1:])
