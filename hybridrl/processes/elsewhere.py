"""Sandboxes that others enforce: containers of docker, and servers of SandboxFusion.

A server runs a program and forgets it (https://bytedance.github.io/SandboxFusion), as the sandbox
here does. So a container lives for one program, too.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx

from hybridrl.errors import SandboxError
from hybridrl.processes.sandbox import SandboxLimits, SandboxResult, read_outputs

_START_S = 5.0
"""Beyond the time of a program: its container starts, or it travels to a server."""

_PAUSE_S = 0.2
_REMOVE_S = 4.0
"""A daemon that hangs costs a tool no more: with the program's time within agent.tool_timeout_s."""

_LONGEST_PROGRAM = 100_000  # bytes; an argument of a command may have 128 KiB
_KILLED = 128 + signal.SIGKILL
_BEGIN = 'echo "$1" >&2; exec timeout -s KILL "$2" python -c "$3"'
"""Without its first line the container did not start, whatever the exit status is."""


@dataclass(frozen=True, slots=True)
class DockerSandbox:
    """Runs programs in containers without network; the image has python, sh and timeout."""

    limits: SandboxLimits
    image: str

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """See ``Runner``."""
        if len(program.encode()) > _LONGEST_PROGRAM:
            return SandboxResult(stdout="", stderr="", status=1, exceeded="program length")
        name, token = (f"hybridrl-{secrets.token_hex(16)}" for _ in range(2))
        wall_s, pipe = self.limits.wall_s, subprocess.PIPE
        command = [*self._command(name), "sh", "-c", _BEGIN, "sh", token, f"{wall_s:g}", program]
        with tempfile.TemporaryFile() as file:
            file.write(stdin.encode())
            file.seek(0)
            try:
                process = subprocess.Popen(command, stdin=file, stdout=pipe, stderr=pipe)
            except OSError as error:
                raise SandboxError(f"sandbox=docker: {error}; install docker") from error
        with process:
            try:
                longer = replace(self.limits, wall_s=wall_s + _START_S)
                outputs, exceeded = read_outputs(process, longer)
            finally:
                if process.poll() is None:  # the container would outlive the command
                    remove = ["docker", "rm", "--force", name]
                    with suppress(subprocess.TimeoutExpired):
                        subprocess.run(remove, capture_output=True, timeout=_REMOVE_S, check=False)
                    process.kill()
        stdout, errors = (bytes(output).decode(errors="replace") for output in outputs)
        before, began, stderr = errors.partition(f"{token}\n")
        if not began:
            raise SandboxError(f"sandbox=docker:{self.image} started none: {before[-300:].strip()}")
        status = process.returncode
        exceeded = exceeded or ("wall time or memory" if status == _KILLED else "")
        return SandboxResult(stdout=stdout, stderr=stderr, status=status, exceeded=exceeded)

    def _command(self, name: str) -> list[str]:
        limits, memory = self.limits, f"{self.limits.memory_mib}m"
        limited = f"--memory={memory} --memory-swap={memory} --pids-limit={limits.processes + 2}"
        files = f"--read-only --tmpfs=/tmp:size={limits.files_mib}m --workdir=/tmp"
        rights = "--network=none --cap-drop=ALL --security-opt=no-new-privileges --user=65534:65534"
        cpu = f"--ulimit=cpu={max(1, round(limits.cpu_s))}"
        started = f"docker run --rm --interactive --pull=never --name={name}"
        return [*f"{started} {limited} {files} {rights} {cpu}".split(), self.image]


@dataclass(frozen=True, slots=True)
class HttpSandbox:
    """Runs programs on a server of SandboxFusion, which has limits of its own."""

    limits: SandboxLimits
    url: str
    """Of ``/run_code``."""

    def run(self, program: str, *, stdin: str = "") -> SandboxResult:
        """See ``Runner``. A server that refuses is asked again for half a program's time."""
        wall_s = self.limits.wall_s
        asked: dict[str, object] = {"code": program, "language": "python", "stdin": stdin}
        asked |= {"compile_timeout": wall_s, "run_timeout": wall_s, "files": {}, "fetch_files": []}
        asked["memory_limit_MB"] = self.limits.memory_mib
        deadline = time.monotonic() + wall_s / 2
        while True:
            try:
                limit_s = wall_s + _START_S
                answer = httpx.post(self.url, json=asked, timeout=limit_s, trust_env=False)
                if answer.status_code != httpx.codes.OK:
                    raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
                return self._result_of(answer.json())
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
                if time.monotonic() + _PAUSE_S > deadline:
                    reason = f"{type(error).__name__}: {error}"
                    raise SandboxError(f"sandbox={self.url} ran no program: {reason}") from error
            time.sleep(_PAUSE_S)

    def _result_of(self, answer: dict[str, Any]) -> SandboxResult:
        """Read an answer; ValueError, KeyError or TypeError if it has no result."""
        if answer["status"] not in ("Success", "Failed"):
            raise ValueError(f"{answer['status']}: {answer.get('message')!r:.200}")
        ran = answer["run_result"] or answer["compile_result"]
        is_late, status = ran["status"] == "TimeLimitExceeded", ran.get("return_code")
        stdout, most_chars = str(ran.get("stdout") or ""), 1024 * self.limits.output_kib
        return SandboxResult(
            stdout=stdout[:most_chars],
            stderr=str(ran.get("stderr") or ""),
            status=int(answer["status"] == "Failed") if status is None else int(status),
            exceeded="wall time" if is_late else "output" if len(stdout) > most_chars else "",
        )
