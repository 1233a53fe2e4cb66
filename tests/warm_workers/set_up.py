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
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "HYBRIDRL_TESTS_WARM_WORKERS"
"""Variable that holds the name of the server's socket."""

LENGTH_BYTES = 8
"""A request begins with its length, and carries the three standard streams."""

DIFFERENT = b"different"
"""Answer to a request whose worker must be started as Ray does it."""


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
        request = {"command": command, "environment": environment, "folder": os.getcwd()}
        answer = _ask_server(request)
        if answer != DIFFERENT:
            sys.exit(int(answer or b"1"))
    path = Path(command[0]).with_name("setup_worker.py")
    os.execv(sys.executable, [sys.executable, str(path), *arguments])


def _ask_server(request: dict[str, Any]) -> bytes:
    text = json.dumps(request).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address_of(os.environ[SOCKET]))
        server.sendmsg([len(text).to_bytes(LENGTH_BYTES, "big")], streams)
        server.sendall(text)
        return server.recv(64)  # exit status of the worker, nothing if the server is gone


if __name__ == "__main__":
    main(sys.argv[1:])
