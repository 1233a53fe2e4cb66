"""Nodes without memory, stores without room: what they are called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray.exceptions import OutOfDiskError, OutOfMemoryError, RayTaskError

from hybridrl.errors import WorkerDiedError
from hybridrl.single_controller.failures import FailedCall


@pytest.mark.shows("R7.4")
def test_a_rank_killed_by_the_memory_monitor_is_named_dead() -> None:
    reset = RayTaskError("reduce", "traceback text", ConnectionError("reset by peer"))
    failures = {0: reset, 1: OutOfMemoryError("8.1GB used / 8GB")}
    failed = FailedCall("update", ["host-a", "host-b"], failures, late=[])
    assert failed.dead == [1]
    error = failed.error()
    assert isinstance(error, WorkerDiedError)
    assert str(error).startswith("rank 1 on host-b: update() failed: Ray's memory monitor killed")
    assert "8.1GB used / 8GB" in str(error)


def test_a_result_without_a_place_names_the_key_of_the_store() -> None:
    full = RayTaskError("make", "traceback text", OutOfDiskError("Local disk is full"))
    error = FailedCall("make", ["host-a"], {0: full}, late=[]).error()
    assert "cluster.object_store_mib=N" in str(error)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "environment", "words"),
    [
        ("memory", {"RAY_memory_usage_threshold": "0.01"}, "WorkerDiedError: rank 0 on"),
        ("argument", {"RAY_local_fs_capacity_threshold": "0.0001"}, "ResourceError: an argument"),
        ("result", {"RAY_local_fs_capacity_threshold": "0.0001"}, "RemoteCallError: rank 0 on"),
        ("spilled", {}, "[209715200]"),
    ],
)
def test_what_a_real_ray_says_is_understood(
    case: str, environment: dict[str, str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.single_controller.memory_faults", case],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert words in done.stdout, done.stdout + done.stderr
    remedies = {"memory": "rollout.num_slots", "spilled": ""}
    assert remedies.get(case, "cluster.object_store_mib") in done.stdout
