"""A real Ray cluster of one node, as `ray start --head` makes it, that belongs to one test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridrl.workers.rollout.sglang.process import free_port
from tests.waiting import wait_until

_RAY = Path(sys.executable).with_name("ray")
_START_S = 120.0


@dataclass(frozen=True)
class RayHead:
    process: subprocess.Popen[bytes]
    address: str
    dashboard: str
    environment: Mapping[str, str]
    """With the token of this cluster alone."""

    def kill(self) -> None:
        """What a lost machine looks like: nothing says goodbye."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@contextmanager
def ray_head(*, has_dashboard: bool = False, num_cpus: int = 2) -> Iterator[RayHead]:
    """Start a head in a process group of its own, and end whatever it started, by pid."""
    # Not in tmp_path: Ray puts sockets there, and their names may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    port, dashboard_port = free_port(), free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    command = [
        *(str(_RAY), "start", "--head", "--block", f"--port={port}", f"--num-cpus={num_cpus}"),
        *(f"--temp-dir={folder}", f"--include-dashboard={str(has_dashboard).lower()}"),
        *(f"--dashboard-port={dashboard_port}", "--object-store-memory=100000000"),
        # Jobs reach this node's agent there; the default is that of every other Ray of the machine.
        *(f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"),
    ]
    with (folder / "head.txt").open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    address = f"127.0.0.1:{port}"
    head = RayHead(process, address, f"http://127.0.0.1:{dashboard_port}", environment)
    try:
        _wait_until_started(process, folder / "head.txt")
        yield head
    finally:
        _end(folder)
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def second_raylet(head: RayHead, *, num_cpus: int = 2) -> Iterator[None]:
    """Let another node of the same machine join, which ends with the head at the latest."""
    command = [
        *(str(_RAY), "start", f"--address={head.address}", "--block", f"--num-cpus={num_cpus}"),
        *("--object-store-memory=100000000", f"--dashboard-agent-listen-port={free_port()}"),
        "--disable-usage-stats",
    ]
    output = Path(tempfile.mkdtemp(prefix="raylet-")) / "raylet.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=dict(head.environment), stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait_until_started(process, output)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
        shutil.rmtree(output.parent, ignore_errors=True)


def _end(folder: Path) -> None:
    # All processes of this Ray have its folder on their command line; raylets, which workers
    # outlive for a moment, first.
    for _ in range(20):
        family = [p for p in psutil.process_iter() if str(folder) in " ".join(_command_line(p))]
        if not family:
            return
        for one in family:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=1)
    raise AssertionError(f"processes are left: {family}")


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _wait_until_started(process: subprocess.Popen[bytes], output: Path) -> None:
    wait_until(
        lambda: "Ray runtime started" in output.read_text() or process.poll() is not None,
        deadline_s=_START_S,
    )
    assert process.poll() is None, output.read_text()
