from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from hybridrl.env import ROOT
from hybridrl.errors import ResourceError
from hybridrl.run.cluster import require_device, show_workers_no_more
from hybridrl.run.workers import rank_variables, start_group
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
    register,
)
from hybridrl.trainer.interrupt import RunInterrupted, ended_by_signals
from tests.config.values import config_of
from tests.end_to_end.small import small_config


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_before_ray_would_wait_for_one(tmp_path: Path) -> None:
    cluster = replace(small_config(tmp_path / "run").cluster, device="cuda")
    with pytest.raises(ResourceError, match="no NVIDIA device; set cluster=cpu"):
        require_device(cluster)
    require_device(replace(cluster, ray_address="auto"))  # that cluster's nodes may have some
    require_device(replace(cluster, device="cpu"))


def test_a_ray_that_does_not_start_is_answered_with_what_to_type() -> None:
    program = (
        "from hybridrl.run.cluster import ray_cluster\n"
        "from tests.config.values import config_of\n"
        "with ray_cluster(config_of().cluster): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": "/proc/nowhere"},
        timeout=200,
        capture_output=True,
        text=True,
    )
    message = done.stderr.splitlines()[-1]
    assert "ResourceError: Ray does not start on this machine: [Errno" in message
    assert "type `ray start --head`, then set cluster.ray_address=auto" in message
    assert "logs are in /proc/nowhere/ray/session_latest/logs" in message


def test_a_start_that_is_stopped_shows_no_output_of_workers_any_more() -> None:
    # A worker that is ended while it starts writes C++ stacks, which Ray copies to the terminal.
    shown: list[object] = []
    global_worker_stdstream_dispatcher.add_handler("ray_print_logs", shown.append)
    with pytest.raises(RunInterrupted), ended_by_signals(show_workers_no_more):
        os.kill(os.getpid(), signal.SIGINT)
    global_worker_stdstream_dispatcher.emit("*** SIGTERM received")
    assert shown == []


def test_tensor_parallel_ranks_on_cuda_get_one_hardware_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    gpus = ("cluster=one_gpu", "cluster.num_ranks_per_node=8", "actor=megatron")
    cut = config_of(*gpus, "megatron.tensor_parallel_size=2")
    assert rank_variables(cut) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert rank_variables(config_of(*gpus)) == {}
    assert rank_variables(replace(cut, cluster=replace(cut.cluster, device="cpu"))) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    assert rank_variables(cut) == {}


class Environment(Worker):
    """Says what a variable was before its constructor ran."""

    def __init__(self) -> None:
        self.queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

    @register(Dispatch.ONE_TO_ALL)
    def told(self) -> str | None:
        return self.queues


def test_variables_reach_ranks_before_their_workers_are_made(
    ray_cluster: None, tmp_path: Path
) -> None:
    cluster = replace(small_config(tmp_path / "run").cluster, num_ranks_per_node=2)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    worker = RayClassWithInitArgs(Environment)
    with start_group(cluster, worker, variables=variables) as group:
        assert group.told() == ["1", "1"]
    both = create_colocated_worker_cls({"first": worker, "second": worker})
    with start_group(cluster, both, variables=variables) as fused:
        assert fused.second_told() == ["1", "1"]


_LATE_RAYLET = """
import time
import ray
from hybridrl.run import cluster
from tests.config.values import config_of
began, get_node = time.monotonic(), cluster.services.get_node


def get_node_late(address, node):
    if time.monotonic() - began < {late_s}:
        raise RuntimeError("it has not registered")  # as Ray says it
    return get_node(address, node)


cluster.services.get_node = get_node_late
cluster._RAYLET_LIMIT_S = {limit_s}
with cluster.ray_cluster(config_of().cluster):
    print("answers", ray.get(ray.remote(lambda: 7).remote()))
"""


def start_of_late_raylet(*, late_s: float, limit_s: float) -> tuple[str, str]:
    program = _LATE_RAYLET.format(late_s=late_s, limit_s=limit_s)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.stdout, done.stderr


@pytest.mark.nightly
def test_a_raylet_that_is_late_on_a_busy_machine_is_waited_for() -> None:
    said, _ = start_of_late_raylet(late_s=45.0, limit_s=150.0)  # Ray itself waits 30 s
    assert "answers 7" in said


def test_a_raylet_that_never_comes_is_told_with_the_load_of_the_machine() -> None:
    _, log = start_of_late_raylet(late_s=999.0, limit_s=0.3)
    assert re.search(r"within 0\.3 s; the load is \d+ on \d+ cores: if that is busy, type", log)


_HANGING_START = """
import time
from hybridrl.run import cluster
from tests.config.values import config_of
cluster._START_LIMIT_S = 0.5
cluster.ray.init = lambda **_: time.sleep(60)
with cluster.ray_cluster(config_of().cluster):
    pass
"""


@pytest.mark.shows("R3.5")
def test_a_start_of_ray_that_hangs_ends_the_driver() -> None:
    command = [sys.executable, "-c", _HANGING_START]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:00.500000)!" in done.stderr
    assert "in _start_ray" in done.stderr
