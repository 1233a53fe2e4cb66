from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from hybridrl.config.cluster import ClusterConfig, SetupHook
from hybridrl.errors import ConfigError, RemoteCallError, ResourceError
from hybridrl.run.cluster import keep_token_private, require_device, show_workers_no_more
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

_BEGIN = """
import pathlib, subprocess, sys, time
import ray
from hybridrl.processes import guard
from hybridrl.run import cluster
from hybridrl.run.cluster import ended_with_ray
from tests.config.values import config_of
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_before_ray_would_wait_for_one() -> None:
    cluster = replace(config_of().cluster, device="cuda")
    with pytest.raises(ResourceError, match="no NVIDIA device; set cluster=cpu"):
        require_device(cluster)
    require_device(replace(cluster, ray_address="auto"))  # that cluster's nodes may have some
    require_device(replace(cluster, device="cpu"))


def test_a_start_that_is_stopped_shows_no_output_of_workers_any_more() -> None:
    # A worker that is ended while it starts writes C++ stacks, which Ray copies to the terminal.
    shown: list[object] = []
    global_worker_stdstream_dispatcher.add_handler("ray_print_logs", shown.append)
    with pytest.raises(RunInterrupted), ended_by_signals(show_workers_no_more):
        os.kill(os.getpid(), signal.SIGINT)
    global_worker_stdstream_dispatcher.emit("*** SIGTERM received")
    assert shown == []


_LATE_RAYLET = """
began, get_node = time.monotonic(), cluster.services.get_node

def get_node_late(address, node):
    if time.monotonic() - began < {late_s}:
        raise RuntimeError("it has not registered")  # as Ray says it
    return get_node(address, node)

cluster.services.get_node = get_node_late
cluster._RAYLET_LIMIT_S = {limit_s}
"""

_HANGING = """
cluster._START_LIMIT_S = 0.5
cluster.ray.init = lambda **_: time.sleep(60)
"""


def _start(change: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    work = "    print('answers', ray.get(ray.remote(lambda: 7).remote()))"
    program = f"{_BEGIN}{change}\nwith cluster.ray_cluster(config_of().cluster):\n{work}"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_ray_that_does_not_start_is_answered_with_what_to_type() -> None:
    message = _start(RAY_TMPDIR="/proc/nowhere").stderr.splitlines()[-1]
    assert "ResourceError: Ray does not start on this machine: [Errno" in message
    assert "type `ray start --head`, then set cluster.ray_address=auto" in message
    assert "logs are in /proc/nowhere/ray/session_latest/logs" in message


@pytest.mark.nightly
def test_a_raylet_that_is_late_on_a_busy_machine_is_waited_for() -> None:
    done = _start(_LATE_RAYLET.format(late_s=45.0, limit_s=150.0))  # Ray itself waits 30 s
    assert "answers 7" in done.stdout


def test_a_raylet_that_never_comes_is_told_with_the_load_of_the_machine() -> None:
    log = _start(_LATE_RAYLET.format(late_s=999.0, limit_s=0.3)).stderr
    assert re.search(r"within 0\.3 s; the load is \d+ on \d+ cores: if that is busy, type", log)


@pytest.mark.shows("R3.5")
def test_a_start_of_ray_that_hangs_ends_the_driver() -> None:
    done = _start(_HANGING)
    assert done.returncode == 1
    assert "Timeout (0:00:00.500000)!" in done.stderr
    assert "in _start_ray" in done.stderr


_WITH_RAY = """
with cluster.ray_cluster(config_of().cluster):
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


@pytest.mark.shows("R8.2")
def test_a_ray_started_here_has_a_private_token_and_its_driver_ends_with_its_head(
    tmp_path: Path,
) -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("RAY_AUTH_")}
    status, errors = _end_of(_WITH_RAY, "", environment | {"HOME": str(tmp_path)})
    assert status == 1
    assert "Ray's gcs_server ended" in errors  # Ray itself would end the driver after 60 s
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600


def test_the_end_of_a_raylet_ends_the_driver_too(tmp_path: Path) -> None:
    program = tmp_path / "raylet"
    shutil.copy("/bin/sleep", program)
    status, errors = _end_of(_WITHOUT_RAY, str(program), os.environ)
    assert status == 1
    assert "Ray's raylet ended" in errors


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


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


@pytest.mark.shows("R8.2")
def test_a_token_that_is_there_is_kept_and_its_readers_are_told(
    token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token.parent.mkdir()
    token.write_text("mine")
    with caplog.at_level(logging.WARNING, logger="hybridrl"):
        token.chmod(0o644)
        keep_token_private()
        token.chmod(0o600)
        keep_token_private()
    assert token.read_text() == "mine"
    [message] = caplog.messages
    assert f"chmod 600 {token}" in message


def test_a_token_appears_whole(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_there_before = []

    def draw(num_bytes: int) -> str:
        is_there_before.append(token.exists())
        return "7" * 2 * num_bytes

    monkeypatch.setattr(secrets, "token_hex", draw)
    keep_token_private()
    assert is_there_before == [False]
    assert token.read_text() == "7" * 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "0" * 64)]
)
def test_where_the_user_chose_another_way_no_token_is_made(
    token: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert not token.parent.exists()


calls: list[str] = []
no_function = 3


def remember() -> None:
    calls.append(os.environ["RANK"])


def fail() -> None:
    raise LookupError("no kernel here")


class Listener(Worker):
    """Says what was so when its constructor ran."""

    def __init__(self) -> None:
        from tests.run import test_cluster  # the module that the hook is in, not a pickled copy

        self.before = list(test_cluster.calls), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

    @register(Dispatch.ONE_TO_ALL)
    def heard(self) -> tuple[list[str], str | None]:
        return self.before


LISTENER = RayClassWithInitArgs(Listener)
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return replace(small_config(tmp_path / "run").cluster, num_ranks_per_node=2)


def hooked(cluster: ClusterConfig, name: str) -> ClusterConfig:
    return replace(cluster, worker_setup_hook=f"{__name__}.{name}")


@pytest.mark.shows("6.9")
def test_each_process_gets_variables_and_calls_the_hook_once_before_its_first_worker(
    ray_cluster: None, cluster: ClusterConfig
) -> None:
    remembering = hooked(cluster, "remember")
    with start_group(remembering, LISTENER, variables=ONE_QUEUE) as group:
        assert group.heard() == [(["0"], "1"), (["1"], "1")]
    both = create_colocated_worker_cls({"first": LISTENER, "second": LISTENER})
    with start_group(remembering, both, variables=ONE_QUEUE) as fused:
        assert fused.second_heard() == [(["0"], "1"), (["1"], "1")]
    with start_group(cluster, LISTENER) as group:
        assert [calls for calls, _ in group.heard()] == [[], []]


def test_a_hook_that_cannot_be_called_ends_the_start_and_names_the_key(
    ray_cluster: None, cluster: ClusterConfig
) -> None:
    with pytest.raises(RemoteCallError) as caught:
        start_group(hooked(cluster, "fail"), LISTENER)
    assert f"ConfigError: cluster.worker_setup_hook='{__name__}.fail'" in str(caught.value)
    assert "it raised LookupError: no kernel here" in str(caught.value)
    assert "set cluster.worker_setup_hook=null" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{__name__}.no_function", "has no_function=3, which is no function"),
        (f"{__name__}.rememmber", "has no rememmber"),
        ("nowhere.install", "nowhere cannot be imported here: ModuleNotFoundError"),
    ],
)
def test_a_hook_that_a_worker_does_not_find_is_named(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SetupHook(path)()


def test_tensor_parallel_ranks_on_cuda_get_one_hardware_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    gpus = ("cluster=one_gpu", "cluster.num_ranks_per_node=8", "actor=megatron")
    cut = config_of(*gpus, "megatron.tensor_parallel_size=2")
    assert rank_variables(cut) == ONE_QUEUE
    assert rank_variables(config_of(*gpus)) == {}
    assert rank_variables(replace(cut, cluster=replace(cut.cluster, device="cpu"))) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    assert rank_variables(cut) == {}
