"""One process that calls reward functions and can be killed."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridrl.config.limits import ArgumentValue
from hybridrl.config.reward import BUILT_IN_REWARDS, RewardPart
from hybridrl.errors import RewardError, suggest_name
from hybridrl.processes.guarded import end_guarded, guarded
from hybridrl.processes.sandbox import Level, Sandbox, SandboxLimits
from hybridrl.rewards import child
from hybridrl.rewards.channel import Channel, ChannelClosed, Garbage, Refused
from hybridrl.rewards.child import Reward

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 60.0
_MAX_RESTARTS = 2
_CONCURRENT_GRACE_S = 1.0
"""Added where the process itself limits each row: it answers before it is killed."""

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
    lengths: list[int]  # tokens of the response
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    """Role and text of each message behind the prompt; empty if all responses are single turns."""
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """Further columns of the data, by the name that functions ask for."""

    def __len__(self) -> int:
        return len(self.responses)

    def columns(self) -> dict[str, list[Any]]:
        """Return all columns by name."""
        usual = (each.name for each in fields(self) if each.name != "own")
        return {name: getattr(self, name) for name in usual} | {**self.own}

    def take(self, rows: Sequence[int]) -> RewardInputs:
        """Return some rows, in the order of ``rows``."""
        taken = {
            name: [column[row] for row in rows] if column else []
            for name, column in self.columns().items()
        }
        own = {name: taken.pop(name) for name in self.own}
        return RewardInputs(**taken, own=own)


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionFile:
    """A reward function in a Python file, and its arguments."""

    path: Path
    name: str
    args: Mapping[str, ArgumentValue]

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


class CallFailed(Exception):
    """A call did not give all rewards. Never leaves this package: the pool calls again without."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.rewards: dict[int, Reward] = {}
        """Rewards by row that came before."""


class CallHung(CallFailed):
    """A call took longer than it may, and was killed."""


class CallKilled(CallFailed):
    """The process was killed from outside."""


class ChildRunner:
    """Runs users' functions in a process of its own, with a deadline for every call.

    A thread cannot be killed, and a fork of the driver would copy running threads of Ray and torch.
    So it is a fresh interpreter (60 ms, plus the imports of the file). It has a session of its own,
    so Ctrl-C does not reach it. All processes and daemons that it starts die with it: see
    `hybridrl.processes.guard`.
    """

    def __init__(self, functions: Sequence[FunctionFile], *, timeout_s: float) -> None:
        """Start the process and load the functions.

        Args:
            functions: called by their number in this list.
            timeout_s: seconds for one call, from the first byte of its input on; of a function of
                one row for each row.

        Raises:
            RewardError: a function cannot be loaded within 60 s.
        """
        self._functions = functions
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_ended = False
        self._start()

    @property
    def kinds(self) -> tuple[str, ...]:
        """How each function is called; see `channel.KINDS`."""
        return self._kinds

    def call(self, inputs: RewardInputs, function: int = 0) -> list[Reward]:
        """Return the rewards of a function, or reasons why there is none.

        A process that somebody killed, the kernel for want of memory for example, is started again
        and asked again, twice at most; all attempts share the ``timeout_s`` seconds.

        Raises:
            CallFailed: the call raised, died or hung; has the rewards that came before.
            RewardError: functions had to be loaded again, and that failed.
        """
        rewards: dict[int, Reward] = {}
        remaining_s, num_restarts = self._timeout_s, 0
        while True:
            self._start_again_if_gone(function)
            begin, num_before = time.monotonic(), len(rewards)
            try:
                self._call_once(inputs, function, rewards, remaining_s)
                return [rewards[row] for row in range(len(inputs))]
            except CallKilled as killed:
                if len(rewards) > num_before:
                    remaining_s, num_restarts = self._timeout_s, 0  # it died of another row
                remaining_s -= time.monotonic() - begin
                if num_restarts == _MAX_RESTARTS or remaining_s <= 0.0:
                    killed.rewards = rewards
                    raise
                num_restarts += 1
                log.warning(
                    "the process of reward.function=%s %s during a call; "
                    "it is started again (%d of %d)",
                    *(self._functions[function], killed, num_restarts, _MAX_RESTARTS),
                )
            except CallFailed as failure:
                failure.rewards = rewards
                raise

    def end(self) -> None:
        """Kill the process and all that it started, for good; another thread's call then fails."""
        with self._lock:
            self._is_ended = True
        end_guarded(self._process)

    def close(self) -> None:
        """Leave nothing behind. Twice is a no-op. No other thread may be in a call."""
        self.end()
        self._drop()

    def _drop(self) -> None:
        self._is_dropped = True
        self._channel.close()
        end_guarded(self._process)

    def _call_once(
        self, inputs: RewardInputs, function: int, rewards: dict[int, Reward], timeout_s: float
    ) -> None:
        """Add the rewards of the rows that have none yet."""
        deadline = time.monotonic() + timeout_s
        rows = [row for row in range(len(inputs)) if row not in rewards]
        call = {"function": function, "columns": inputs.take(rows).columns()}
        try:
            self._channel.send(call, timeout_s=timeout_s)
        except TimeoutError as error:
            self._drop()
            raise CallHung(f"did not read its input within {self._timeout_s:g} s") from error
        except ChannelClosed as error:
            raise self._death() from error
        grace_s = _CONCURRENT_GRACE_S if self._kinds[function] == "concurrent" else 0.0
        try:
            for first, values in self._channel.receive(
                num_rewards=len(rows), timeout_s=deadline - time.monotonic() + grace_s
            ):
                rewards.update(zip(rows[first:], values, strict=False))
        except TimeoutError as error:
            self._drop()
            raise CallHung(f"took longer than {self._timeout_s:g} s") from error
        except (ChannelClosed, Garbage, Refused) as error:
            raise self._failure_of(error) from error

    def _failure_of(self, error: ChannelClosed | Garbage | Refused) -> CallFailed:
        if isinstance(error, ChannelClosed):
            return self._death()
        if isinstance(error, Refused):
            return CallFailed(str(error))
        self._drop()
        return CallFailed(f"{error}; its process was ended")

    def _start_again_if_gone(self, function: int) -> None:
        status = self._process.poll()
        if status is None:
            return
        if not self._is_dropped:  # else the error is known
            log.warning(
                "the process of reward.function=%s %s between calls; it is started again",
                *(self._functions[function], _describe_end(status)),
            )
        self._drop()
        self._start()

    def _start(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            # -P: its folder must not hide modules of the standard library.
            command = [sys.executable, "-P", child.__file__, str(child_end.fileno())]
            with self._lock:
                if self._is_ended:
                    parent_end.close()
                    raise CallFailed("its process was ended with the run")
                self._process = subprocess.Popen(
                    guarded(command),
                    pass_fds=[child_end.fileno()],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
        self._channel = Channel(parent_end)
        self._is_dropped = False
        self._kinds = self._load()

    def _load(self) -> tuple[str, ...]:
        load = {
            "functions": [
                {"path": str(each.path), "name": each.name, "args": dict(each.args)}
                for each in self._functions
            ],
            "search_path": [entry for entry in sys.path if isinstance(entry, str)],
            "timeout_s": self._timeout_s,
        }
        try:
            self._channel.send({"load": load}, timeout_s=_LOAD_TIMEOUT_S)
            return self._channel.receive_kinds(
                num_functions=len(self._functions), timeout_s=_LOAD_TIMEOUT_S
            )
        except (TimeoutError, ChannelClosed, Garbage, Refused) as error:
            self._drop()
            reason = str(error) or _describe_end(self._process.returncode)
            if isinstance(error, TimeoutError):
                reason = f"took longer than {_LOAD_TIMEOUT_S:g} s"
            number = error.function if isinstance(error, Refused) else 0
            raise RewardError(
                f"reward.function={self._functions[number]} cannot be loaded: {reason}; "
                "correct the file"
            ) from error

    def _death(self) -> CallFailed:
        """Return the error of a process that ended, and make sure that it did."""
        self._drop()
        kind = CallKilled if self._process.returncode in _KILLED else CallFailed
        return kind(_describe_end(self._process.returncode))


def _describe_end(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended its process, exit code {status}"


def find_function(part: RewardPart) -> FunctionFile:
    """Find the file of a function.

    Raises:
        RewardError: no such name or file.
    """
    spelled = part.function
    if spelled in BUILT_IN_REWARDS:
        path = Path(__file__).with_name(f"{BUILT_IN_REWARDS[spelled]}.py")
        return FunctionFile(path=path, name=spelled, args=part.args)
    file, colon, name = spelled.rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.function={spelled!r} is not built in; "
            f"{suggest_name(spelled, [*BUILT_IN_REWARDS])} "
            "For your own set reward.function=path/to/file.py:function"
        )
    if not Path(file).is_file():
        raise RewardError(
            f"reward.function={spelled!r}: {file} is not a file; paths are relative to {Path.cwd()}"
        )
    return FunctionFile(path=Path(file), name=name, args=part.args)


def check_sandbox(part: RewardPart) -> None:
    """Try the sandbox of a function that runs code.

    Raises:
        SandboxError: this machine cannot enforce it.
    """
    if part.function == "code":
        level: Level = "limits" if part.args.get("sandbox") == "limits" else "namespaces"
        Sandbox(SandboxLimits(), level).check()
