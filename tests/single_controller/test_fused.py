from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridrl.errors import DispatchError
from hybridrl.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from tests.single_controller.workers import Actor, Critic


@pytest.fixture(scope="module")
def fused(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    classes = {"actor": RayClassWithInitArgs(Actor, 10), "critic": RayClassWithInitArgs(Critic)}
    with RayWorkerGroup(RayResourcePool([2]), create_colocated_worker_cls(classes)) as group:
        yield group


def test_roles_share_each_process_and_are_reached_by_prefix(fused: RayWorkerGroup) -> None:
    groups = fused.spawn({"actor", "critic"})
    assert groups["actor"].pid() == groups["critic"].pid() == fused.actor_pid()
    assert len(set(fused.actor_pid())) == 2


def test_roles_find_each_other_also_while_they_are_built(fused: RayWorkerGroup) -> None:
    actor = fused.spawn(["actor"])["actor"]
    [version, _] = actor.update()
    assert fused.critic_read_actor() == [(True, version)] * 2
    fused.actor_update()
    assert fused.spawn({"critic"})["critic"].read_actor() == [(True, version + 1)] * 2
    assert actor.execute_rank_zero_sync("pid") == actor.pid()[0]


def test_methods_by_name_need_a_role(fused: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"any of \['actor', 'critic'\]; call it on .* spawn"):
        fused.execute_all("pid")


def test_a_prefix_that_was_not_fused_names_the_nearest(fused: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match="no fused worker 'critc'; did you mean 'critic'"):
        fused.spawn({"critc"})


def test_spawned_groups_hide_the_prefix(fused: RayWorkerGroup) -> None:
    with pytest.raises(AttributeError, match="no registered worker method 'actor_pid'"):
        _ = fused.spawn({"actor"})["actor"].actor_pid


@pytest.mark.parametrize("prefix", ["", "not a name"])
def test_a_prefix_must_be_a_name(prefix: str) -> None:
    with pytest.raises(DispatchError, match="a prefix is a Python name"):
        create_colocated_worker_cls({prefix: RayClassWithInitArgs(Critic)})


def test_what_is_not_a_worker_cannot_be_a_role() -> None:
    with pytest.raises(DispatchError, match="int is not a worker"):
        RayClassWithInitArgs(int)
