"""``cluster.worker_setup_hook`` on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.cluster import ClusterConfig, SetupHook
from hybridrl.errors import ConfigError, RemoteCallError
from hybridrl.run.workers import start_group
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    Worker,
    create_colocated_worker_cls,
    register,
)
from tests.end_to_end.small import small_config
from tests.run import hooks

_HOOKS = "tests.run.hooks"


class Listener(Worker):
    """Says what the hook had done when its constructor ran."""

    def __init__(self) -> None:
        self.before = list(hooks.calls)

    @register(Dispatch.ONE_TO_ALL)
    def heard(self) -> list[str]:
        return self.before


LISTENER = RayClassWithInitArgs(Listener)


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterConfig:
    return replace(small_config(tmp_path / "run").cluster, num_ranks_per_node=2)


def hooked(cluster: ClusterConfig, name: str) -> ClusterConfig:
    return replace(cluster, worker_setup_hook=f"{_HOOKS}.{name}")


@pytest.mark.shows("6.9")
def test_each_process_calls_it_once_before_its_first_worker(
    ray_cluster: None, cluster: ClusterConfig
) -> None:
    with start_group(hooked(cluster, "remember"), LISTENER) as group:
        assert group.heard() == [["0"], ["1"]]
    both = create_colocated_worker_cls({"first": LISTENER, "second": LISTENER})
    with start_group(hooked(cluster, "remember"), both) as fused:
        assert fused.second_heard() == [["0"], ["1"]]
    with start_group(cluster, LISTENER) as group:
        assert group.heard() == [[], []]


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
def test_one_that_cannot_be_called_ends_the_start_and_names_the_key(
    ray_cluster: None, cluster: ClusterConfig, name: str, words: str
) -> None:
    with pytest.raises(RemoteCallError) as caught:
        start_group(hooked(cluster, name), LISTENER)
    assert f"ConfigError: cluster.worker_setup_hook='{_HOOKS}.{name}'" in str(caught.value)
    assert words in str(caught.value)
    assert "set cluster.worker_setup_hook=null" in str(caught.value)


def test_a_module_that_a_worker_does_not_find_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be imported here: ModuleNotFoundError"):
        SetupHook("nowhere.install")()
