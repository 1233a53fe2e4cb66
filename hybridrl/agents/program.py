"""The agent program of one conversation: a command of the user's, which leaves no process behind.

Whatever it does, the event loop of the rollout is not held up: a thread reads what it writes, since
a loop that has output to read would never decode.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from hybridrl import env
from hybridrl.processes.guard import end_guarded, guarded

_TAIL_BYTES = 4096
_LINE_CHARS = 300
# The guard reads its own standard input, so the command gets another.
_WITH_INPUT = ("/bin/sh", "-c", 'input=$1; shift; exec "$@" <"/proc/self/fd/$input"', "sh")


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    status: int
    """Exit status; of a killed one the signal, negative."""

    last_line: str
    """The last line that it wrote to standard error; empty without one."""


class AgentProgram:
    """A running command, with all processes that it starts. Kill it in any case."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        hidden_variables: Collection[str],
        input_text: str,
        threads: Executor,
    ) -> None:
        """Start it.

        Args:
            variables: of its environment, besides this process's own.
            hidden_variables: names of this process's own that it does not get.
            input_text: its standard input.
            threads: holds a thread for as long as the program runs.
        """
        descriptor = os.memfd_create("input")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(input_text.encode())
            self._process = subprocess.Popen(
                guarded([*_WITH_INPUT, str(descriptor), *command]),
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**env.everything(but=hidden_variables), **variables},
            )
        finally:
            os.close(descriptor)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ProgramEnd] = loop.run_in_executor(threads, self._watch)
        """Done when all processes have ended."""

    def kill(self) -> None:
        """Begin to kill the program and all processes that it started. Twice is a no-op."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard waits for this

    def _watch(self) -> ProgramEnd:
        """Read standard error until the guard has ended, which is when all processes are dead."""
        tail = b""
        with self._process.stderr or open(os.devnull, "rb") as errors:
            ended = os.pidfd_open(self._process.pid)
            poll = select.poll()
            for descriptor in (errors.fileno(), ended):
                poll.register(descriptor, select.POLLIN)
            is_open, has_ended = True, False
            while is_open and not has_ended:
                ready = {descriptor for descriptor, _ in poll.poll()}
                has_ended = ended in ready
                if errors.fileno() in ready:
                    part = os.read(errors.fileno(), 1 << 16)
                    tail, is_open = (tail + part)[-_TAIL_BYTES:], bool(part)
            os.close(ended)
        self._process.wait()
        end_guarded(self._process)  # if the guard itself was killed
        lines = tail.decode(errors="replace").splitlines()
        written = [line.strip() for line in lines if line.strip()]
        return ProgramEnd(self._process.returncode, written[-1][:_LINE_CHARS] if written else "")
