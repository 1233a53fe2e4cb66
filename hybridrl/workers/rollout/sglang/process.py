"""A server as a child of this process: started, watched, ended with all its own children.

A guard ends everything when its standard input closes: only this process holds that pipe, so its
death leaves no process behind. The child should do so too (see ``end_with_parent``), in case the
guard is killed with this process.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hybridrl import env
from hybridrl.diagnostics import activity
from hybridrl.errors import DeadlineError, EngineError, ServerDiedError
from hybridrl.network import LOOPBACK
from hybridrl.processes.guard import end_guarded, guarded

log = logging.getLogger(__name__)

_POLL_S = 0.1
_TELL_EVERY_S = 5.0
_NUM_LINES = 25
_STDIN = 0
_NOISE = re.compile(r"Ignore import error|DeprecationWarning|FutureWarning|UserWarning|^\s*warn")
"""Messages of every server start about optional packages."""

_PORTS = (20_000, 32_000)


class ChildProcess:
    """One server in a session of its own."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        variables: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Start it, with ``variables`` on top of this process's environment.

        ``arguments`` are JSON in a file whose path ends the command. The file is for its owner
        alone, and goes when the server is ready: a command line would show keys to everybody.
        """
        self.name = name
        self._arguments_file: Path | None = None
        if arguments is not None:
            handle, path = tempfile.mkstemp(prefix="hybridrl-server-", suffix=".json")
            with os.fdopen(handle, "w", encoding="utf-8") as arguments_handle:
                json.dump(arguments, arguments_handle, allow_nan=False)
            self._arguments_file = Path(path)
            command = [*command, path]
        handle, path = tempfile.mkstemp(prefix="hybridrl-server-", suffix=".log")
        self.log_file = Path(path)
        # First, and again after the others: SGLang names its processes only if the variable that
        # comes first stays as it is (setproctitle looks for the command line in front of it).
        own = {"PYTHONPATH": env.python_path(), **(variables or {})}
        with os.fdopen(handle, "wb") as log_handle:
            self._process = subprocess.Popen(
                guarded(command),
                stdin=subprocess.PIPE,
                stdout=log_handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=own | env.everything() | own,
            )
        self._begin = time.monotonic()
        self._num_boring_bytes = 0  # of its log, from before it was ready

    @property
    def pid(self) -> int:
        """The guard (`processes/guard.py`), the session leader, which ends as the server does."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """Return how it ended; None while it runs. Negative is the signal that killed it."""
        return self._process.poll()

    def require_alive(self, what: str) -> None:
        """Raise a ServerDiedError if it is gone: how it ended, and the last lines of its log."""
        status = self.exit_status()
        if status is not None:
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            raise ServerDiedError(f"{what}: {self.name} (process {self.pid}) {how}\n{self.tail()}")

    def wait_until_ready(self, is_ready: Callable[[], bool], *, timeout_s: float) -> float:
        """Poll ``is_ready`` until it is true, and return the seconds since the start.

        An EngineError if it ended before, a DeadlineError if it is late; both with its last lines.
        """
        try:
            took_s = self._wait(is_ready, timeout_s)
            self._num_boring_bytes = self.log_file.stat().st_size
            return took_s
        except ServerDiedError as error:  # it would do so again: a restart does not help
            raise EngineError(str(error)) from error
        finally:
            self._forget_arguments()

    def _wait(self, is_ready: Callable[[], bool], timeout_s: float) -> float:
        last_word_s = self._begin
        with activity.scope(f"wait for {self.name} to start"):
            while not is_ready():
                self.require_alive("it did not start")
                now = time.monotonic()
                if now - self._begin > timeout_s:
                    raise DeadlineError(
                        f"{self.name} did not answer within rollout.start_timeout_s="
                        f"{timeout_s:g} s; raise it if the server is only slow\n{self.tail()}"
                    )
                if now - last_word_s > _TELL_EVERY_S:
                    last_word_s = now
                    log.info("starting %s: took_s=%.0f", self.name, now - self._begin)
                time.sleep(_POLL_S)
        return time.monotonic() - self._begin

    def tail(self) -> str:
        """Return the last lines of its log; of a server that was ready only later lines."""
        try:
            log = self.log_file.read_bytes()[self._num_boring_bytes :]
        except OSError as error:
            return f"(its log cannot be read: {error})"
        text = log.decode("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
        return "\n".join(["last lines of its log:", *(f"  {line}" for line in lines[-_NUM_LINES:])])

    def end(self) -> None:
        """Kill it with all its children, and delete its log. Idempotent."""
        end_guarded(self._process)
        self.log_file.unlink(missing_ok=True)
        self._forget_arguments()

    def _forget_arguments(self) -> None:
        if self._arguments_file is not None:
            self._arguments_file.unlink(missing_ok=True)


def free_port() -> int:
    """Return a port without a listener, below those that systems assign until it is bound."""
    while not is_port_free(port := random.randrange(*_PORTS)):
        pass
    return port


def is_port_free(port: int) -> bool:
    """Return whether nothing listens on a port of this machine's loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((LOOPBACK, port))
            return True
    return False


def end_with_parent() -> None:
    """In the child: kill the own session as soon as standard input closes."""

    def wait() -> None:
        while os.read(_STDIN, 1):  # not sys.stdin, whose lock an ending interpreter needs
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
