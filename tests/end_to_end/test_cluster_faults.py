"""What befalls a run on a cluster that is not its own: no head, a lost head, no memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.ray_head import ray_head
from tests.end_to_end.small import read_metrics, small_overrides
from tests.waiting import wait_until


@pytest.mark.nightly  # by day test_sweep.py has a job with such an address
@pytest.mark.shows("R11.3")
@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_named_at_once(tmp_path: Path, prefix: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = _run(tmp_path, f"cluster.ray_address={prefix}{address}", timeout_s=200)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"cluster.ray_address={prefix}{address}: nothing listens at {address}" in done.stderr
    assert "cluster.ray_address=null" in done.stderr


@pytest.mark.nightly
def test_ray_address_of_the_environment_is_what_null_means(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        environment = os.environ | {"RAY_ADDRESS": address}
        done = _run(tmp_path, "cluster.num_nodes=2", environment=environment, timeout_s=200)
    assert f"nothing listens at {address}" in done.stderr


@pytest.mark.nightly
def test_a_cluster_with_another_token_is_named(tmp_path: Path) -> None:
    with ray_head() as head:
        environment = {**head.environment, "RAY_AUTH_TOKEN": "0" * 32}
        address = f"cluster.ray_address={head.address}"
        done = _run(tmp_path, address, environment=environment, timeout_s=200)
    assert done.returncode == 1
    assert "ResourceError: no Ray cluster takes this driver" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr


@pytest.mark.shows("R11.3")
@pytest.mark.nightly
def test_a_killed_head_ends_the_run_with_one_named_error(tmp_path: Path) -> None:
    with ray_head() as head:
        folder = tmp_path / "run"
        overrides = small_overrides(
            folder, f"cluster.ray_address={head.address}", "trainer.num_steps=100000"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.main", *overrides],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(head.environment),
        )
        try:
            metrics = folder / "metrics.jsonl"
            wait_until(
                lambda: metrics.is_file() and len(read_metrics(folder)) >= 3,
                deadline_s=200,
                process=process,
            )
            head.kill()
            _, errors = process.communicate(timeout=55)  # Ray itself would end it after 60 s
        finally:
            process.kill()
            process.wait(timeout=60)
    assert process.returncode == 1, errors
    # Whether the driver still lives to say it itself depends on what it did at that moment.
    assert errors.count("ClusterLostError: ") == 1
    assert "ClusterLostError" in (folder / "log.txt").read_text()


def _run(
    folder: Path,
    *overrides: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridrl.main", *small_overrides(folder / "run", *overrides)],
        env=None if environment is None else dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
