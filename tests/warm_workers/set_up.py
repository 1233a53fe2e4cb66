"""Ray starts this in place of its ``setup_worker.py``: asks the server for a worker.

It stays until the worker has ended, with its exit status. It imports little, as a start of it is
part of the start of each worker.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

SOCKET = "HYBRIDRL_TESTS_WARM_WORKERS"
"""Variable that holds the name of the server's socket."""

LENGTH_BYTES = 8
"""A request begins with its length, and carries the three standard streams."""

DIFFERENT = "different\n"
"""Answer to a request whose process must be started in the usual way."""


def address_of(name: str) -> bytes:
    """Return the address of the server's socket, which no file system holds."""
    return b"\0" + name.encode()


def main(arguments: list[str]) -> NoReturn:
    """Have the server fork a worker and wait for its end; or start it as Ray does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, command = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    is_plain = known.language == "PYTHON" and not context.get("command_prefix")
    if is_plain and command[0].endswith("default_worker.py"):
        environment = dict(os.environ) | (context.get("env_vars") or {})
        status = forked(SOCKET, command, environment)
        if status is not None:
            sys.exit(status)
    path = Path(command[0]).with_name("setup_worker.py")
    os.execv(sys.executable, [sys.executable, str(path), *arguments])


def forked(
    variable: str,
    command: list[str],
    environment: Mapping[str, str],
    *,
    stdin: int = 0,
    begun: Callable[[int], object] = lambda pid: None,
) -> int | None:
    """Have a server run a command in a fork, and return its exit status when it has ended.

    None if its environment is another than that of the server, whose address is in ``variable``.
    ``begun`` gets the number of the process.
    """
    request = {"command": command, "environment": environment, "folder": os.getcwd()}
    text = json.dumps(request).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stdin, 1, 2]))]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address_of(os.environ[variable]))
        server.sendmsg([len(text).to_bytes(LENGTH_BYTES, "big")], streams)
        server.sendall(text)
        with server.makefile() as answers:
            if (pid := answers.readline()) == DIFFERENT:
                return None
            begun(int(pid or 0))
            return int(answers.readline() or 1)  # nothing if the server is gone


if __name__ == "__main__":
    main(sys.argv[1:])
