"""Calls one reward function: a built-in one here, a user's in a process that can be killed."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from hybridrl.diagnostics.processes import end_guarded, guarded
from hybridrl.errors import RewardError
from hybridrl.rewards import child
from hybridrl.rewards.channel import Channel, ChannelClosed, Garbage, Refused

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 60.0
_MAX_RESTARTS = 2
_KILLED = tuple(
    -number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
)
"""Signals of processes that were killed from outside, and did not crash."""


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


class CallKilled(CallFailed):
    """The process was killed from outside."""


class RewardRunner(Protocol):
    """One loaded reward function."""

    def call(self, inputs: RewardInputs) -> Sequence[float | str]:
        """Return the reward of each response; a value that is not a number comes as text.

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

    A thread cannot be killed, and a fork of the driver would copy running threads of Ray and torch.
    So it is a fresh interpreter (60 ms, plus the imports of the file). It has a session of its own,
    so Ctrl-C does not reach it. All processes and daemons that it starts die with it: see
    `hybridrl.guard`.
    """

    def __init__(self, path: Path, name: str, *, timeout_s: float) -> None:
        """Start the process and load the function.

        Args:
            path: Python file.
            name: function in it.
            timeout_s: seconds for one call, from the first byte of its input on.

        Raises:
            RewardError: the function cannot be loaded within 60 s.
        """
        self._path = path
        self._name = name
        self._timeout_s = timeout_s
        self._start()

    def call(self, inputs: RewardInputs) -> Sequence[float | str]:
        """Return its rewards.

        A process that somebody killed, the kernel for want of memory for example, is started again
        and asked again, twice at most; all attempts share the ``timeout_s`` seconds.

        Raises:
            CallFailed: it raised, died or hung.
            RewardError: it had to be loaded again, and that failed.
        """
        remaining_s = self._timeout_s
        num_restarts = 0
        while True:
            self._start_again_if_gone()
            begin = time.monotonic()
            try:
                return self._call_once(inputs, remaining_s)
            except CallKilled as killed:
                remaining_s -= time.monotonic() - begin
                if num_restarts == _MAX_RESTARTS or remaining_s <= 0.0:
                    raise
                num_restarts += 1
                log.warning(
                    "the process of %s %s during a call; it is started again (%d of %d)",
                    *(self._describe(), killed, num_restarts, _MAX_RESTARTS),
                )

    def close(self) -> None:
        """Kill the process and all that it started. Twice is a no-op."""
        self._is_closed = True
        self._channel.close()
        end_guarded(self._process)

    def _call_once(self, inputs: RewardInputs, timeout_s: float) -> Sequence[float | str]:
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send({"columns": asdict(inputs)}, timeout_s=timeout_s)
        except TimeoutError as error:
            self.close()
            raise CallHung(f"did not read its input within {self._timeout_s:g} s") from error
        except ChannelClosed as error:
            raise self._death() from error
        return self._receive(len(inputs), deadline - time.monotonic(), limit_s=self._timeout_s)

    def _start_again_if_gone(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        if not self._is_closed:  # else the error is known
            log.warning(
                "the process of %s %s between calls; it is started again",
                *(self._describe(), _describe_end(status)),
            )
        self.close()
        self._start()

    def _start(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            # -P: its folder must not hide modules of the standard library.
            command = [sys.executable, "-P", child.__file__, str(child_end.fileno())]
            self._process = subprocess.Popen(
                guarded(command),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        self._channel = Channel(parent_end)
        self._is_closed = False
        search_path = [entry for entry in sys.path if isinstance(entry, str)]
        load = {"path": str(self._path), "name": self._name, "search_path": search_path}
        try:
            self._channel.send({"load": load}, timeout_s=_LOAD_TIMEOUT_S)
            self._receive(0, _LOAD_TIMEOUT_S, limit_s=_LOAD_TIMEOUT_S)
        except (CallFailed, TimeoutError, ChannelClosed) as error:
            self.close()
            reason = str(error) or _describe_end(self._process.returncode)
            raise RewardError(
                f"{self._describe()} cannot be loaded: {reason}; correct the file"
            ) from error

    def _describe(self) -> str:
        return f"reward.function={self._path}:{self._name}"

    def _receive(
        self, num_rewards: int, timeout_s: float, *, limit_s: float
    ) -> Sequence[float | str]:
        try:
            return self._channel.receive(num_rewards=num_rewards, timeout_s=timeout_s)
        except TimeoutError as error:
            self.close()
            raise CallHung(f"took longer than {limit_s:g} s") from error
        except ChannelClosed as error:
            raise self._death() from error
        except Garbage as error:
            self.close()
            raise CallFailed(f"{error}; its process was ended") from error
        except Refused as error:
            raise CallFailed(str(error)) from error

    def _death(self) -> CallFailed:
        """Return the error of a process that ended, and make sure that it did."""
        self.close()
        kind = CallKilled if self._process.returncode in _KILLED else CallFailed
        return kind(_describe_end(self._process.returncode))


def _describe_end(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended its process, exit code {status}"
