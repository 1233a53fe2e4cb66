"""Runs Python that nobody trusts: own namespaces, few rights, limits on all that it may use.

What a level cannot enforce on this machine is refused with the reason; see `Sandbox.check`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, get_args

from hybridrl.errors import SandboxError

Level = Literal["namespaces", "limits"]

_CHILD = Path(__file__).with_name("sandbox_child.py")
_ELSEWHERE = "hybridrl.processes.elsewhere"
"""Imported by name on request: httpx takes 0.1 s."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The resources of one run."""

    cpu_s: float = 5.0
    """Processor time of each process, rounded to seconds."""

    wall_s: float = 10.0
    """Time from start to end, in seconds."""

    memory_mib: int = 512
    """Address space of each process; the sum is bounded by ``processes`` times this."""

    processes: int = 8
    """Processes and threads at a time."""

    files_mib: int = 16
    """Size of a file, and of all files in /tmp together."""

    output_kib: int = 256
    """Bytes of standard output, and of standard error, that are kept; at more it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """The end of one run."""

    stdout: str
    stderr: str

    status: int
    """Exit status; a negative one is the number of the signal that killed it."""

    exceeded: str
    """Limit that it was killed for: ``wall time``, ``output`` or ``processor time``; or empty."""


class Runner(Protocol):
    """Runs programs, of which each is alone, and leaves nothing behind."""

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """Run a Python program; SandboxError: it did not run, which says nothing about it."""
        ...


def open_sandbox(place: str, limits: SandboxLimits) -> Runner:
    """Return the sandbox of a level, of ``docker:IMAGE``, or of a server's address.

    SandboxError: ``place`` is none of them.
    """
    opened: Runner
    for level in get_args(Level):
        if place == level:
            return Sandbox(limits, level)
    kind, _, image = place.partition(":")
    if kind == "docker" and image:
        opened = import_module(_ELSEWHERE).DockerSandbox(limits, image)
    elif kind in ("http", "https"):
        opened = import_module(_ELSEWHERE).HttpSandbox(limits, place)
    else:
        raise SandboxError(
            f"sandbox={place} is none; use namespaces, limits, docker:IMAGE, or the address of a "
            "server of SandboxFusion, http://HOST:PORT/run_code"
        )
    return opened


def require_sandbox(place: str) -> None:
    """Raise SandboxError, with the reason, if programs cannot run in a sandbox."""
    sandbox = open_sandbox(place, SandboxLimits())
    if isinstance(sandbox, Sandbox):
        sandbox.check()
    elif (result := sandbox.run("print('fine')")).stdout != "fine\n":
        raise SandboxError(f"sandbox={place}: a trial failed: {result}")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs programs, each alone. ``limits`` alone is no sandbox: files and network are open."""

    limits: SandboxLimits
    level: Level = "namespaces"

    def check(self) -> None:
        """Raise SandboxError, with the reason, if this machine cannot enforce the level."""
        if reason := _refusal(self.level):
            raise SandboxError(
                f"programs cannot be held in a sandbox on this machine: {reason}; "
                "run where user namespaces are allowed, or accept less with sandbox=limits, "
                "which leaves files and network open to the program"
            )

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """See ``Runner``; its text is /program.py, its working folder an empty /tmp."""
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            return self._run({**self._task(folder), "program": program, "stdin": stdin})

    def _task(self, folder: str) -> dict[str, object]:
        limits = self.limits
        cpu_s = max(1, round(limits.cpu_s))
        memory, files = limits.memory_mib * _MIB, limits.files_mib * _MIB
        processes = limits.processes + 2  # two wait for the program
        return {
            "level": self.level,
            "folder": folder,
            "folders": [os.path.realpath(sys.base_prefix)],
            "python": os.path.realpath(sys.executable),
            "tmp_bytes": files,
            "limits": {
                "CPU": (cpu_s, cpu_s + 1),
                "AS": (memory, memory),
                "FSIZE": (files, files),
                "NOFILE": (64, 64),
                "CORE": (0, 0),
                "MSGQUEUE": (0, 0),
                "MEMLOCK": (0, 0),
                **({"NPROC": (processes, processes)} if self.level == "namespaces" else {}),
            },
        }

    def _run(self, task: dict[str, object]) -> SandboxResult:
        reader, writer = os.pipe()
        with open(reader, "rb") as report:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CHILD), str(writer)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[writer],
                    env={},
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            with process:
                try:
                    if process.stdin is not None:
                        with suppress(BrokenPipeError), process.stdin:
                            process.stdin.write(json.dumps(task).encode())
                    outputs, exceeded = read_outputs(process, self.limits)
                finally:
                    if process.returncode is None:
                        # The set-up and process 1, with which the kernel ends the namespace.
                        with suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
            lines = report.read(1 << 16).splitlines()
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if reason := answer.get("refused"):
                raise SandboxError(f"the sandbox could not be set up: {reason}")
        stdout, stderr = (bytes(output).decode(errors="replace") for output in outputs)
        if not answers and not exceeded:
            raise SandboxError(f"the sandbox ended without a report: {stderr[-500:]}")
        status = os.waitstatus_to_exitcode(answers[0]["status"]) if answers else -signal.SIGKILL
        if status in (-signal.SIGXCPU, -signal.SIGKILL) and not exceeded:
            exceeded = "processor time"
        return SandboxResult(stdout=stdout, stderr=stderr, status=status, exceeded=exceeded)


def read_outputs(
    process: subprocess.Popen[bytes], limits: SandboxLimits
) -> tuple[list[bytearray], str]:
    """Read both outputs of a process to their ends, or to a limit, which is named."""
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise RuntimeError("the process was started without pipes")
    deadline = time.monotonic() + limits.wall_s
    outputs = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for stream, output in ((stdout, outputs[0]), (stderr, outputs[1])):
            selector.register(stream, selectors.EVENT_READ, output)
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return outputs, "wall time"
            for key, _ in selector.select(remaining_s):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                if len(key.data) > limits.output_kib * 1024:
                    del key.data[limits.output_kib * 1024 :]
                    return outputs, "output"
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
        return outputs, ""
    return outputs, "wall time"


@cache
def _refusal(level: Level) -> str:
    """Return why this machine cannot enforce a level; empty if it can."""
    try:
        result = Sandbox(SandboxLimits(), level).run("print('fine')")
    except SandboxError as error:
        return str(error)
    return "" if result.stdout == "fine\n" else f"a trial failed: {result}"
