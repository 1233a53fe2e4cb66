"""The process that Ray's workers are forked from: ``python -m tests.warm_workers.server FD``."""

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
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tests.warm_workers.set_up import DIFFERENT, LENGTH_BYTES

_PRELOADED = ("hybridrl.models.adapter", "tensordict")
_PRELOADED_WITH_RAY = ("ray._private.workers.default_worker", "hybridrl.workers.actor_rollout")
_READ_WHILE_LOADED = ("OMP_", "KMP_", "MKL_", "LD_", "MALLOC_", "GLIBC_", "TORCH", "PYTHONHASH")
"""How variables begin that a forked worker cannot have otherwise than this process."""


class Server:
    """Forks a worker for each request, until standard input ends; then ends them all."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._environment = _read_while_loaded(dict(os.environ))  # torch adds to it
        for name in _PRELOADED:
            import_module(name)
        if "ray" in sys.modules:  # it reads its token once, and workers would have none
            raise ImportError(f"one of {', '.join(_PRELOADED)} imports ray")
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _answer(self, connection: socket.socket) -> None:
        request, streams = _receive(connection)
        if "ray" not in sys.modules:
            _import_with(request["environment"])
        if _read_while_loaded(request["environment"]) == self._environment:
            pid = os.fork()
            if not pid:
                self._forget(connection)
                _become_worker(request, streams)
            self._workers[pid] = connection
        else:
            with connection:
                connection.sendall(DIFFERENT)
        for stream in streams:
            os.close(stream)

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
            with self._workers.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                connection.sendall(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())


def _import_with(environment: dict[str, str]) -> None:
    """Import Ray, whose C++ reads its variables then, with those of the first worker."""
    os.environ.update(environment)
    for name in _PRELOADED_WITH_RAY:
        import_module(name)
    gc.freeze()
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise RuntimeError(f"{num_threads} threads run after the imports: a fork would have one")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    text, length = b"", int.from_bytes(head, "big")
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), streams


def _read_while_loaded(environment: dict[str, str]) -> dict[str, str]:
    return {n: value for n, value in environment.items() if n.startswith(_READ_WHILE_LOADED)}


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
        worker, *arguments = request["command"]
        sys.argv = [worker, *arguments]
        sys.path[0] = str(Path(worker).parent)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in paths if path and path not in sys.path]
        runpy.run_path(worker, run_name="__main__")
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        Server(inherited).serve()
    os._exit(0)
