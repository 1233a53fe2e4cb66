"""Calls one reward function: a built-in one here, a user's in a process that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from hybridrl.errors import RewardError
from hybridrl.rewards import child

_LOAD_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInputs:
    """Columns of B responses to be scored."""

    responses: list[str]
    answers: list[str]
    prompts: list[str]
    sources: list[str]

    def __len__(self) -> int:
        return len(self.responses)

    def one(self, index: int) -> RewardInputs:
        """Return the row ``index`` alone."""
        at = slice(index, index + 1)
        return RewardInputs(
            responses=self.responses[at],
            answers=self.answers[at],
            prompts=self.prompts[at],
            sources=self.sources[at],
        )


class CallFailed(Exception):
    """A call gave no rewards. Never leaves this package: the scorer finds the response at fault."""


class CallHung(CallFailed):
    """A call took longer than it may, and was killed."""


class RewardRunner(Protocol):
    """One loaded reward function."""

    def call(self, inputs: RewardInputs) -> Sequence[float | str]:
        """Return what the function says to each response; text stands for what is no number.

        Raises:
            CallFailed: it raised, died or hung.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind. Twice is a no-op."""
        ...


class InProcessRunner:
    """Runs a built-in function right here."""

    def __init__(self, function: Callable[..., list[float]]) -> None:
        """Hold the function."""
        self._function = function

    def call(self, inputs: RewardInputs) -> Sequence[float | str]:
        """Return its rewards."""
        return self._function(**asdict(inputs))

    def close(self) -> None:
        """Do nothing."""


class ChildRunner:
    """Runs a user's function in a process of its own, with a deadline for every call.

    A thread could not be killed, and a fork of the driver would copy Ray's and torch's threads in
    the middle of what they do; so it is a fresh interpreter (40 ms, plus what the file imports). It
    has a session of its own: Ctrl-C does not reach it, and what it starts dies with it.
    """

    def __init__(self, path: Path, name: str, *, timeout_s: float) -> None:
        """Start the process and load the function.

        Args:
            path: Python file.
            name: function in it.
            timeout_s: seconds for one call.

        Raises:
            RewardError: the function cannot be loaded within 60 s.
        """
        self._path = path
        self._name = name
        self._timeout_s = timeout_s
        self._start()

    def call(self, inputs: RewardInputs) -> Sequence[float | str]:
        """Return its rewards; the process is started again if the last call ended it.

        Raises:
            CallFailed: it raised, died or hung.
            RewardError: it had to be loaded again, and that failed.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        try:
            self._connection.send(asdict(inputs))
        except BlockingIOError as error:
            self.close()
            raise CallHung(f"did not read its input within {self._timeout_s:g} s") from error
        except OSError as error:
            raise CallFailed(self._describe_death()) from error
        kind, values = self._receive(self._timeout_s)
        if kind == "failed":
            raise CallFailed(values[0])
        return values

    def close(self) -> None:
        """Kill the process and all that it started. Twice is a no-op."""
        self._connection.close()
        with suppress(ProcessLookupError):  # before wait(): until then the id cannot be reused
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # A child that does not read, a stopped one for example, must not hold up who writes.
        limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self._process = subprocess.Popen(
                # -P: its folder must not hide modules of the standard library.
                [sys.executable, "-P", child.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send((str(self._path), self._name, sys.path))
            kind, values = self._receive(_LOAD_TIMEOUT_S)
        except (CallFailed, OSError) as error:
            self.close()
            raise RewardError(self._cannot_load(str(error))) from error
        if kind == "failed":
            self.close()
            raise RewardError(self._cannot_load(str(values[0])))

    def _cannot_load(self, reason: str) -> str:
        return (
            f"reward.function={self._path}:{self._name} cannot be loaded: {reason}; mend the file"
        )

    def _receive(self, timeout_s: float) -> tuple[str, list[float | str]]:
        if not self._connection.poll(timeout_s):
            self.close()
            raise CallHung(f"took longer than {timeout_s:g} s")
        try:
            answer: tuple[str, list[float | str]] = self._connection.recv()
        except (EOFError, OSError) as error:
            raise CallFailed(self._describe_death()) from error
        return answer

    def _describe_death(self) -> str:
        self.close()
        return f"ended its process, exit code {self._process.returncode}"
