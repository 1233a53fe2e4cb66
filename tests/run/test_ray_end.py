"""A Ray started here has a token, and its driver ends at once when a process of it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.composing import composed

_BEGIN = """
import json, pathlib, subprocess, sys, time
from hybridrl.processes import guard
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.supervise import ended_with_ray
"""

_WITH_RAY = """
import ray
from hybridrl.config.load import load_config
with ray_cluster(load_config(json.loads(sys.argv[1])).cluster):
    assert ray.get(ray.remote(lambda: 7).remote(), timeout=60) == 7
    [pid] = [pid for pid in guard.descendants() if guard.process_name(pid) == "gcs_server"]
    print(pid, flush=True)
    time.sleep(600)
"""

_WITHOUT_RAY = """
child = subprocess.Popen([sys.argv[1], "600"])
while guard.process_name(child.pid) != pathlib.Path(sys.argv[1]).name:
    time.sleep(0.01)
with ended_with_ray():
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def end(home: Path) -> tuple[int, str]:
    """How a driver ended whose Ray lost its head, which it had started with this home."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("RAY_AUTH_")}
    return _end_of(_WITH_RAY, json.dumps(composed()), environment | {"HOME": str(home)})


def test_a_driver_ends_at_once_without_the_head_of_its_ray(end: tuple[int, str]) -> None:
    status, errors = end
    assert status == 1
    assert "Ray's gcs_server ended" in errors  # Ray itself would end the driver after 60 s


@pytest.mark.shows("R8.2")
@pytest.mark.usefixtures("end")
def test_a_ray_started_here_has_a_token_that_nobody_else_can_read(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_each_process_of_ray_ends_the_driver(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    status, errors = _end_of(_WITHOUT_RAY, str(program), os.environ)
    assert status == 1
    assert f"Ray's {name} ended" in errors


def _end_of(program: str, argument: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a driver, kill the process whose id it prints; return how the driver ended."""
    command = [sys.executable, "-c", _BEGIN + program, argument]
    pipe = subprocess.PIPE
    environment = {**environment, "RAY_preload_python_modules": "json"}  # not what ranks need
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            os.kill(int(process.stdout.readline()), signal.SIGKILL)
            _, errors = process.communicate(timeout=50)
        finally:
            process.kill()
    return process.returncode, errors
