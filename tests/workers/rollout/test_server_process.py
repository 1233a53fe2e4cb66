from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.processes.guard import members_of
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port
from tests.waiting import wait_until

SERVER = """
import subprocess, sys, time
from hybridrl.workers.rollout.sglang.process import end_with_parent
end_with_parent()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""


@contextmanager
def running(script: str) -> Iterator[ChildProcess]:
    server = ChildProcess([sys.executable, "-c", textwrap.dedent(script)], name="the server")
    try:
        yield server
    finally:
        server.end()


def says(server: ChildProcess, word: str) -> bool:
    return word in server.log_file.read_text(encoding="utf-8")


def wait_until_session_ends(session: int) -> None:
    wait_until(lambda: not members_of(session))


@pytest.mark.shows("R5.5")
def test_a_server_ends_with_its_children_and_its_log() -> None:
    with running(SERVER) as server:
        took_s = server.wait_until_ready(lambda: says(server, "up"), timeout_s=60.0)
        assert "up" not in server.tail()  # what was said before is of no interest any more
        assert took_s > 0
        assert len(members_of(server.pid)) == 3  # guard, server and its child
        server.require_alive("anything")
    assert not members_of(server.pid)
    assert not server.log_file.exists()
    server.end()  # twice is a no-op


def test_a_server_leaves_no_file_in_shared_memory() -> None:
    file = Path(f"/dev/shm/sglang_loads_of_test_{os.getpid()}.shm")  # as SGLang's schedulers do
    script = f"""
import mmap, time
file = open({str(file)!r}, "w+b")
file.truncate(16)
mapped = mmap.mmap(file.fileno(), 16)
print("up", flush=True)
time.sleep(600)
"""
    with running(script) as server:
        server.wait_until_ready(lambda: says(server, "up"), timeout_s=60.0)
        assert file.exists()
    assert not file.exists()


def test_a_server_that_ends_at_its_start_shows_its_last_lines() -> None:
    dies = "import sys; print('no such model'); sys.exit(3)"
    with running(dies) as server, pytest.raises(EngineError) as caught:
        server.wait_until_ready(lambda: False, timeout_s=60.0)
    assert "ended with status 3\nlast lines of its log:\n  no such model" in str(caught.value)
    assert type(caught.value) is EngineError  # new processes would meet the same


def test_a_server_that_was_killed_is_reported_with_the_signal() -> None:
    with running("import time; time.sleep(600)") as server:
        server.require_alive("generate")
        os.kill(server.pid, signal.SIGKILL)
        wait_until_session_ends(server.pid)
        with pytest.raises(ServerDiedError, match=r"generate: the server .* was killed by SIGKILL"):
            server.require_alive("generate")


@pytest.mark.shows("R5.5")
def test_no_server_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent_script = tmp_path / "parent.py"
    parent_script.write_text(
        "import sys, time\n"
        "from hybridrl.workers.rollout.sglang.process import ChildProcess\n"
        f"server = ChildProcess([sys.executable, '-c', {SERVER!r}], name='the server')\n"
        "server.wait_until_ready(lambda: 'up' in server.log_file.read_text(), timeout_s=60.0)\n"
        "print(server.pid, server.log_file, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(parent_script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    session, log_file = parent.stdout.readline().split()
    try:
        assert len(members_of(int(session))) == 3
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until_session_ends(int(session))
    Path(log_file.decode()).unlink()


def test_a_free_port_is_no_port_that_a_system_gives_away() -> None:
    taken = [free_port() for _ in range(20)]
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20_000 <= port < min(32_000, lowest) for port in taken)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", taken[-1]))
