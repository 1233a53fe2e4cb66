"""Two machines as far as a network shows them: each has its own address, host name and /tmp/ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def can_be_made() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-nm", "true"], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Machines:
    folder: Path
    names: tuple[str, str]
    started: list[Started] = field(default_factory=list)

    def start(self, machine: int, *command: str, **variables: str) -> Started:
        name, home = self.names[machine], self.folder / f"home{machine}"
        home.mkdir(exist_ok=True)
        hosts = [f"{address} machine{i}" for i, address in enumerate(ADDRESSES)]
        (home / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (home / "resolv.conf").touch()  # without name servers each question fails at once
        steps = [
            f"mkdir -p {home}/ray /tmp/ray",
            f"mount --bind {home}/ray /tmp/ray",
            f"mount --bind {home}/hosts /etc/hosts",
            f"mount --bind {home}/resolv.conf /etc/resolv.conf",
            f"hostname machine{machine}",
            f"exec {' '.join(command)}",
        ]
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        output = self.folder / f"machine{machine}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "-mu", "bash", "-ec", "; ".join(steps)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Started(process, output))
        return self.started[-1]

    def unplug(self) -> None:
        """Cut the cable: packets are lost, and nobody is told."""
        _ip(f"-n {self.names[1]} link set eth down")


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, words: str, deadline_s: float) -> None:
        wait_until(
            lambda: words in self.text() or self.process.poll() is not None, deadline_s=deadline_s
        )
        assert words in self.text(), self.text()


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Make both machines; with them ends all that runs on them."""
    names = (f"one{os.getpid()}", f"two{os.getpid()}")
    machines = Machines(folder, names)
    for name in names:
        _ip(f"netns add {name}")
    try:
        _ip(f"link add eth netns {names[0]} type veth peer eth netns {names[1]}")
        for name, address, other in zip(names, ADDRESSES, reversed(ADDRESSES), strict=True):
            _ip(f"-n {name} addr add {address}/24 dev eth")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth up")
            _ip(f"-n {name} route add default via {other}")
        yield machines
    finally:
        for name in names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            subprocess.run(["kill", "-9", *pids.stdout.split()], capture_output=True)
            _ip(f"netns del {name}")
        for started in machines.started:
            started.process.wait()


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
