"""Processes in which tools run: a call that hangs, dies or floods costs its process alone."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import AgentError
from hybridrl.processes.guarded import end_guarded, start_guarded_module
from hybridrl.rewards.channel import Channel, ChannelClosed, Garbage, Refused

_CHILD = "hybridrl.agents.tool_child"
_LOAD_TIMEOUT_S = 60.0
_BYTES_PER_CHAR = 12  # of a character that JSON writes as two escapes
_ANSWER_BYTES = 1 << 12


class ToolFailed(Exception):
    """A call gave no result; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolLimits:
    """Limits of one call of a tool."""

    timeout_s: float
    max_chars: int
    """Characters of a result that the model gets; of a longer one it gets both ends."""


class ToolProcess:
    """One process with all tools loaded, started at its first call and after each failure."""

    def __init__(self, functions: Sequence[tuple[Path, str]], limits: ToolLimits) -> None:
        """Start nothing yet. ``functions`` are files and names, called by their number."""
        self._functions = functions
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: int, arguments: Mapping[str, object]) -> str:
        """Return the result as text.

        Raises:
            ToolFailed: the call raised, hung, or ended its process.
            AgentError: the functions cannot be loaded.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        call = {"function": function, "arguments": arguments}
        deadline = time.monotonic() + self._limits.timeout_s
        try:
            self._channel.send(call, timeout_s=self._limits.timeout_s)
            return self._receive(deadline - time.monotonic())
        except Refused as error:
            raise ToolFailed(f"raised {error}") from error
        except TimeoutError as error:
            self.close()
            raise ToolFailed(f"took longer than {self._limits.timeout_s:g} s") from error
        except (ChannelClosed, Garbage) as error:
            raise ToolFailed(self._describe_end(error)) from error

    def close(self) -> None:
        """Kill the process and all that it started. Twice is a no-op."""
        if self._process is not None:
            self._channel.close()
            end_guarded(self._process)
            self._process = None

    def _receive(self, timeout_s: float) -> str:
        max_bytes = _ANSWER_BYTES + _BYTES_PER_CHAR * self._limits.max_chars
        return self._channel.receive_text(max_bytes=max_bytes, timeout_s=timeout_s)

    def _start(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            self._process = start_guarded_module(_CHILD, child_end.fileno())
        self._channel = Channel(parent_end)
        load = [(str(path), name) for path, name in self._functions]
        try:
            message = {"load": load, "max_chars": self._limits.max_chars}
            self._channel.send(message, timeout_s=_LOAD_TIMEOUT_S)
            self._receive(_LOAD_TIMEOUT_S)
        except (TimeoutError, ChannelClosed, Garbage, Refused) as error:
            self.close()
            path, name = self._functions[error.function if isinstance(error, Refused) else 0]
            reason = str(error) or "its process ended, or took longer than 60 s"
            raise AgentError(
                f"agent.tools={path}:{name} cannot be loaded: {reason}; correct the file"
            ) from error

    def _describe_end(self, error: ChannelClosed | Garbage) -> str:
        process = self._process
        self.close()
        if isinstance(error, Garbage) or process is None:
            return str(error)
        status = process.returncode
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended its process, exit code {status}"


class ToolProcesses:
    """Several of them, each with a thread that waits for it. Close it at the end."""

    def __init__(
        self, functions: Sequence[tuple[Path, str]], *, limits: ToolLimits, num_processes: int
    ) -> None:
        """Start nothing yet: each process starts at its first call."""
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="tool")
        self._processes = [ToolProcess(functions, limits) for _ in range(num_processes)]
        self._idle: queue.LifoQueue[ToolProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._idle.put(process)

    def submit(self, function: int, arguments: Mapping[str, object]) -> Future[str]:
        """Call a function in the next process that is idle; see ``ToolProcess.call``."""
        return self._threads.submit(self._call, function, arguments)

    def close(self) -> None:
        """End the running calls, each at its deadline at the latest, and all processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _call(self, function: int, arguments: Mapping[str, object]) -> str:
        process = self._idle.get()
        try:
            return process.call(function, arguments)
        finally:
            self._idle.put(process)
