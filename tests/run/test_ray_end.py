"""A driver ends at once when a process of its own Ray ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import pathlib, subprocess, sys, time
from hybridrl import guard
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.ray_end import ended_with_ray
"""

_WITH_RAY = """
from tests.end_to_end.small import small_config
with ray_cluster(small_config(pathlib.Path(sys.argv[1])).cluster):
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


def test_a_driver_ends_at_once_without_the_head_of_its_ray(tmp_path: Path) -> None:
    status, errors = _end_of(_WITH_RAY, tmp_path / "run")
    assert status == 1
    assert "Ray's gcs_server ended" in errors  # Ray itself would end the driver after 60 s


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_each_process_of_ray_ends_the_driver(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    status, errors = _end_of(_WITHOUT_RAY, program)
    assert status == 1
    assert f"Ray's {name} ended" in errors


def _end_of(program: str, argument: Path) -> tuple[int, str]:
    """Run a driver, kill the process whose id it prints; return how the driver ended."""
    command = [sys.executable, "-c", _BEGIN + program, str(argument)]
    pipe = subprocess.PIPE
    environment = os.environ | {"RAY_preload_python_modules": "json"}  # not what ranks need
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            os.kill(int(process.stdout.readline()), signal.SIGKILL)
            _, errors = process.communicate(timeout=50)
        finally:
            process.kill()
    return process.returncode, errors
