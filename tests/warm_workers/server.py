"""The process that others are forked from: ``python -m tests.warm_workers.server FD NAMES NAMES``.

It imports the modules of the first names at once, and the others in the environment of the first
process that is asked for, which their libraries read while they load. NAMES have commas between.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tests.warm_workers.set_up import DIFFERENT, LENGTH_BYTES

_READ_WHILE_LOADED = (
    *("OMP_", "KMP_", "MKL_", "LD_", "MALLOC_", "GLIBC_", "TORCH", "PYTHONHASH", "SGLANG_"),
)
"""How variables begin that a forked process cannot have otherwise than this process."""

_READ_LATER = "SGLANG_CPU_OMP_THREADS_BIND"
"""Begins so, but is read when a server starts its ranks."""


class Server:
    """Forks a worker for each request, until standard input ends; then ends them all."""

    def __init__(self, listener: socket.socket, names: Sequence[str], later: Sequence[str]) -> None:
        self._listener = listener
        self._later = later
        self._is_loaded = False
        self._environment = _read_while_loaded(dict(os.environ))  # torch adds to it
        for name in names:
            import_module(name)
        if "ray" in sys.modules:  # it reads its token once, and workers would have none
            raise ImportError(f"one of {', '.join(names)} imports ray")
        if "setproctitle" in sys.modules:  # it finds its place beside variables that never changed
            sys.modules["setproctitle"].getproctitle()
        self._workers: dict[int, socket.socket] = {}
        self._child_ended, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno())

    def serve(self) -> None:
        """Return when standard input has ended."""
        with selectors.DefaultSelector() as selector:
            for source in (sys.stdin, self._listener, self._child_ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if sys.stdin in ready:
                    break
                if self._child_ended in ready:
                    self._child_ended.recv(4096)
                    self._report_ended()
                if self._listener in ready:
                    self._answer(self._listener.accept()[0])
        for pid in self._workers:
            for kill in (os.killpg, os.kill):  # it may have had no time to lead its group
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _answer(self, connection: socket.socket) -> None:
        request, streams = _receive(connection)
        if _read_while_loaded(request["environment"]) == self._environment:
            if not self._is_loaded:
                self._import_with(request["environment"])
            pid = os.fork()
            if not pid:
                self._forget(connection)
                _become_worker(request, streams)
            self._workers[pid] = connection
            _tell(connection, pid)
        else:
            with connection:
                connection.sendall(DIFFERENT.encode())
        for stream in streams:
            os.close(stream)

    def _import_with(self, environment: dict[str, str]) -> None:
        """Import the rest, such as Ray, whose C++ reads its variables then."""
        self._is_loaded = True
        os.environ.update(environment)
        for name in self._later:
            import_module(name)
        gc.freeze()
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            raise RuntimeError(f"{num_threads} threads run after the imports: a fork has one")

    def _forget(self, connection: socket.socket) -> None:
        """Close in a forked worker what is the server's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own = (self._listener, self._child_ended, self._wakeup)
        for descriptor in (*own, connection, *self._workers.values()):
            descriptor.close()

    def _report_ended(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._workers.pop(pid) as connection:
                _tell(connection, os.waitstatus_to_exitcode(status) & 0xFF)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits any more
        connection.sendall(f"{number}\n".encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    text, length = b"", int.from_bytes(head, "big")
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), streams


def _read_while_loaded(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_WHILE_LOADED) and name != _READ_LATER
    }


def _become_worker(request: dict[str, Any], streams: list[int]) -> NoReturn:
    os.setpgid(0, 0)  # the raylet ends the process group of a worker
    status = 1
    try:
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        worker, *sys.argv[1:] = request["command"]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[1:1] = [path for path in paths if path not in sys.path]
        if worker.endswith(".py"):
            sys.argv[0], sys.path[0] = worker, str(Path(worker).parent)
            runpy.run_path(worker, run_name="__main__")
        else:
            runpy.run_module(worker, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        Server(inherited, *(names.split(",") for names in sys.argv[2:])).serve()
    os._exit(0)
