"""What a rank's process is given before its workers are made: variables, and a set-up hook."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.cluster import ClusterConfig, SetupHook
from hybridrl.errors import ConfigError, RemoteCallError
from hybridrl.run.workers import rank_variables, start_group
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
    register,
)
from tests.config.values import config_of
from tests.end_to_end.small import small_config

calls: list[str] = []
no_function = 3


def remember() -> None:
    calls.append(os.environ["RANK"])


def fail() -> None:
    raise LookupError("no kernel here")


class Listener(Worker):
    """Says what was so when its constructor ran."""

    def __init__(self) -> None:
        from tests.run import test_workers  # the module that the hook is in, not a pickled copy

        self.before = list(test_workers.calls), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fail", "it raised LookupError: no kernel here"),
        pytest.param(
            *("no_function", "has no_function=3, which is no function"), marks=pytest.mark.nightly
        ),
        ("rememmber", "has no rememmber"),
    ],
)
def test_a_hook_that_cannot_be_called_ends_the_start_and_names_the_key(
    ray_cluster: None, cluster: ClusterConfig, name: str, words: str
) -> None:
    with pytest.raises(RemoteCallError) as caught:
        start_group(hooked(cluster, name), LISTENER)
    assert f"ConfigError: cluster.worker_setup_hook='{__name__}.{name}'" in str(caught.value)
    assert words in str(caught.value)
    assert "set cluster.worker_setup_hook=null" in str(caught.value)


def test_a_module_that_a_worker_does_not_find_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be imported here: ModuleNotFoundError"):
        SetupHook("nowhere.install")()


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
