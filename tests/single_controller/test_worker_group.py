from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import ray
from ray import PlacementGroupID
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from hybridrl.errors import DispatchError, RemoteCallError, ResourceError, WorkerGroupError
from hybridrl.single_controller import (
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    register,
)
from hybridrl.single_controller.actors import rank_environments, rank_order
from hybridrl.single_controller.worker import Location
from tests.single_controller.workers import Actor, Closing, Critic, Napper, Scaler
from tests.waiting import wait_until_gone


def test_every_rank_knows_its_place(four_ranks: RayWorkerGroup) -> None:
    places = four_ranks.describe()
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["local_rank"] for place in places] == [0, 1, 2, 3]
    assert {place["world_size"] for place in places} == {4} == {four_ranks.world_size}
    assert {place["env"]["LOCAL_WORLD_SIZE"] for place in places} == {"4"}
    assert len({place["env"]["MASTER_PORT"] for place in places}) == 1
    assert len({place["pid"] for place in places}) == 4


def test_a_batch_is_split_computed_and_joined_in_order(four_ranks: RayWorkerGroup) -> None:
    rows = np.arange(8.0)
    for by in (1.0, 2.0):
        np.testing.assert_array_equal(four_ranks.scale(rows, by=by), rows * 3.0 * by)


@pytest.mark.shows("4.16")
def test_an_indivisible_batch_is_padded_only_if_the_method_pads(four_ranks: RayWorkerGroup) -> None:
    rows = np.arange(5)
    np.testing.assert_array_equal(four_ranks.answer_twice(rows), np.repeat(rows, 2))
    with pytest.raises(DispatchError, match="5 rows evenly over 4"):
        four_ranks.scale(rows)


def test_a_mesh_gives_peers_one_slice_and_hears_the_leaders(four_ranks: RayWorkerGroup) -> None:
    # Slices [0, 1] and [2, 3]; ranks 0 and 2 answer and add 0 and 200.
    assert four_ranks.generate(np.arange(4)).tolist() == [0, 1, 202, 203]
    with pytest.raises(DispatchError, match=r"ranks \[0, 1, 2, 3\] have not registered the mesh"):
        four_ranks.on_unknown_mesh(np.arange(4))


def test_other_modes_hand_out_entries_or_the_whole_or_ones_own(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.add_rank([10, 20, 30, 40]) == [10, 21, 32, 43]
    assert four_ranks.take_whole([1, 2, 3, 4]) == [[1, 2, 3, 4]] * 4  # as long as the world
    assert four_ranks.on_rank_zero(5) == (0, 5)
    assert four_ranks.seed().get() == 7
    assert four_ranks.own_dispatch(3) == 4 * 6


def test_any_public_method_can_be_executed_by_name(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.execute_all_sync("not_registered", 10) == [10, 11, 12, 13]
    assert four_ranks.execute_rank_zero_sync("not_registered", value=10) == 10
    assert four_ranks.execute_all("describe").get()[3]["rank"] == 3
    with pytest.raises(AttributeError, match="did you mean 'not_registered'"):
        four_ranks.execute_all("not_registred")
    with pytest.raises(AttributeError, match="did you mean 'generate'"):
        _ = four_ranks.genrate


@pytest.mark.parametrize("arguments", [{}, {"rows": [1], "bye": 2}])
def test_wrong_arguments_are_refused_on_the_driver(
    four_ranks: RayWorkerGroup, arguments: dict[str, object]
) -> None:
    with pytest.raises(DispatchError, match=r"scale\(rows"):
        four_ranks.scale(**arguments)


def test_a_future_feeds_the_next_call_without_the_driver(four_ranks: RayWorkerGroup) -> None:
    rows = np.arange(8.0)
    slow = four_ranks.scale_later(rows, delay_s=2.0)
    assert not slow.is_done()
    handed_on = four_ranks.scale_later(slow)  # returns although `slow` is not done
    assert not slow.is_done()
    np.testing.assert_array_equal(four_ranks.scale(handed_on), rows * 27.0)
    np.testing.assert_array_equal(slow.get(), rows * 3.0)
    assert slow.get() is slow.get()


def test_futures_feed_calls_of_other_layouts(four_ranks: RayWorkerGroup) -> None:
    later = four_ranks.scale_later(np.arange(4.0))  # four slices, the mesh has two
    assert four_ranks.generate(later).tolist() == [0, 3, 206, 209]
    rows = np.arange(6)
    padded = four_ranks.answer_twice_later(rows)  # stripped before it is used
    np.testing.assert_array_equal(four_ranks.scale(padded), np.repeat(rows, 2) * 3.0)
    by_rank = four_ranks.add_rank_later([0, 0, 0, 0])
    assert four_ranks.add_rank(by_rank) == [0, 2, 4, 6]
    assert four_ranks.take_whole(four_ranks.seed()) == [7] * 4


def test_get_can_give_up_waiting_while_the_call_goes_on(four_ranks: RayWorkerGroup) -> None:
    later = four_ranks.scale_later(np.arange(4.0), delay_s=2.0)
    with pytest.raises(TimeoutError, match=r"within 0.05 s; it still runs"):
        later.get(timeout_s=0.05)
    assert later.get().tolist() == [0, 3, 6, 9]


def test_coroutines_of_one_worker_run_beside_each_other(ray_cluster: None) -> None:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Napper)) as group:
        first, second = group.meet("b", me="a"), group.meet("a", me="b")
        assert (first.get(timeout_s=20), second.get(timeout_s=20)) == (["a"] * 2, ["b"] * 2)


def test_the_environment_is_set_and_shutdown_leaves_nothing(ray_cluster: None) -> None:
    pool = RayResourcePool([2])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Scaler), env_vars={"FLAVOUR": "plum"})
    places = group.describe()
    assert {place["env"]["FLAVOUR"] for place in places} == {"plum"}
    for _ in range(2):
        group.shutdown()
    wait_until_gone(place["pid"] for place in places)
    assert _num_placement_groups("REMOVED") >= 1
    with pytest.raises(WorkerGroupError, match="was shut down; build a new RayWorkerGroup"):
        group.describe()


@pytest.mark.shows("4.22")
def test_workers_close_on_shutdown(ray_cluster: None, tmp_path: Path) -> None:
    with RayWorkerGroup(
        RayResourcePool([2]), RayClassWithInitArgs(Closing, str(tmp_path / "rank"))
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.0", "rank.1"]


def test_a_constructor_that_raises_names_rank_and_reason(ray_cluster: None) -> None:
    pool = RayResourcePool([2])
    with pytest.raises(RemoteCallError, match=r"rank 1 .*__init__\(\) failed: ValueError: no fac"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler, 2.0, fail_on_rank=1))
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler, 2.0)) as group:  # the pool is free again
        assert group.scale(np.ones(2)).tolist() == [2.0, 2.0]


class _Hiding(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def shutdown(self) -> None: ...


def test_a_worker_method_may_not_hide_one_of_the_group(ray_cluster: None) -> None:
    with pytest.raises(DispatchError, match=r"\['shutdown'\] would hide"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(_Hiding))


def test_ranks_are_ordered_by_node_then_device() -> None:
    locations = [
        Location("10.0.0.10", "node-b", "1", 0),
        Location("10.0.0.9", "node-a", "10", 0),
        Location("10.0.0.10", "node-b", "0", 0),
        Location("10.0.0.9", "node-a", "9", 0),
    ]
    assert rank_order(locations) == [3, 1, 2, 0]


def test_local_rank_is_the_device_or_on_cpus_the_index_on_a_node() -> None:
    gpus = [Location("10.0.0.1", "a", str(gpu), device) for gpu, device in ((2, 0), (5, 0))]
    assert [place["LOCAL_RANK"] for place in rank_environments(gpus, 1)] == ["0", "0"]
    assert {place["MASTER_ADDR"] for place in rank_environments(gpus, 1)} == {"127.0.0.1"}
    cpus = [Location(f"10.0.0.{node}", str(node), None, None) for node in (1, 1, 2, 2)]
    environments = rank_environments(cpus, 29_500)
    assert [place["LOCAL_RANK"] for place in environments] == ["0", "1", "0", "1"]
    assert [place["LOCAL_WORLD_SIZE"] for place in environments] == ["2"] * 4
    assert {place["MASTER_ADDR"] for place in environments} == {"10.0.0.1"}
    assert [place["RANK"] for place in environments] == ["0", "1", "2", "3"]


@pytest.fixture(scope="module")
def fused(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    classes = {"actor": RayClassWithInitArgs(Actor, 10), "critic": RayClassWithInitArgs(Critic)}
    pool = RayResourcePool([2], num_cpus_per_rank=0.25)  # few, as the group stays for the module
    with RayWorkerGroup(pool, create_colocated_worker_cls(classes)) as group:
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


def test_a_role_that_is_missing_or_wrong_is_named(fused: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"any of \['actor', 'critic'\]; call it on .* spawn"):
        fused.execute_all("pid")
    with pytest.raises(DispatchError, match="no fused worker 'critc'; did you mean 'critic'"):
        fused.spawn({"critc"})
    with pytest.raises(AttributeError, match="no registered worker method 'actor_pid'"):
        _ = fused.spawn({"actor"})["actor"].actor_pid
    for prefix in ("", "not a name"):
        with pytest.raises(DispatchError, match="a prefix is a Python name"):
            create_colocated_worker_cls({prefix: RayClassWithInitArgs(Critic)})
    with pytest.raises(DispatchError, match="int is not a worker"):
        RayClassWithInitArgs(int)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs), "traced"

    return wrapper


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, blocking=False)
    def overridden(self) -> str:
        return "base"

    @traced
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wrapped(self) -> str:
        return "wrapped"


class Derived(Base):
    def overridden(self) -> str:
        return f"derived from {super().overridden()}"


# As it stands in a project that uses verl; only the imports were changed.
@ray.remote
class PortedWorker(Worker):
    def __init__(self, config: dict[str, Any], role: str) -> None:
        super().__init__()
        self.config = config
        self.role = role

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.model = self.config["start"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: list[int]) -> list[str]:
        return [f"{self.role}{self.rank}: {self.model + row}" for row in data]


def test_overrides_and_decorated_methods_run_remotely(ray_cluster: None) -> None:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Derived)) as group:
        assert group.overridden().get() == Derived().overridden() == "derived from base"
        assert group.wrapped() == [("wrapped", "traced")] * 2


def test_a_worker_written_for_verl_runs_with_changed_imports(ray_cluster: None) -> None:
    resource_pool = RayResourcePool(process_on_nodes=[2])
    ray_cls_with_init = RayClassWithInitArgs(cls=PortedWorker, config={"start": 10}, role="actor")
    wg = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init)
    wg.init_model()
    assert wg.update_actor([1, 2, 3]) == ["actor0: 11", "actor0: 12", "actor1: 13"]
    with pytest.raises(DispatchError, match=r"update_actor\(data"):
        wg.update_actor()
    wg.shutdown()


def test_a_mode_that_is_not_a_dispatch_is_refused_at_once() -> None:
    with pytest.raises(DispatchError, match="'one_to_all' is not a Dispatch"):
        register(dispatch_mode="one_to_all")  # type: ignore[arg-type]  # the mistake itself


def _num_placement_groups(state: str) -> int:
    return [entry["state"] for entry in ray.util.placement_group_table().values()].count(state)


def test_groups_share_a_pool_and_its_bundles(ray_cluster: None) -> None:
    created_before = _num_placement_groups("CREATED")
    pool = RayResourcePool([2], num_cpus_per_rank=1)
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler, 2.0)) as double,
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler, 3.0)) as triple,
    ):
        assert double.scale(np.ones(2)).tolist() == [2.0, 2.0]
        assert triple.scale(np.ones(2)).tolist() == [3.0, 3.0]
        ports = {g.describe()[0]["env"]["MASTER_PORT"] for g in (double, triple)}
        assert len(ports) == 2
        double.shutdown()
        assert _num_placement_groups("CREATED") == created_before + 1
    assert _num_placement_groups("CREATED") == created_before


@pytest.mark.shows("R11.2")
def test_too_few_resources_say_what_was_asked_and_what_there_is(ray_cluster: None) -> None:
    pool = RayResourcePool([2], use_gpu=True, num_cpus_per_rank=100, wait_s=0.3)
    with pytest.raises(
        ResourceError,
        match=r"reserve within 0.3 s: \[2\] .* 100 CPU, 1 GPU a rank; nodes have 8 CPU, 0 GPU; fre"
        r".* lower cluster.num_nodes or cluster.num_ranks_per_node, .* cluster.start_timeout_s ",
    ):
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler))
    assert _num_placement_groups("PENDING") == 0


def test_a_pool_refuses_more_groups_than_it_was_made_for(ray_cluster: None) -> None:
    pool = RayResourcePool([1, 2], num_cpus_per_rank=0.25, max_colocate_count=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)) as group:
        assert pool.world_size == 3
        assert [place["rank"] for place in group.describe()] == [0, 1, 2]
        with pytest.raises(ResourceError, match="max_colocate_count=2"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Scaler))
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)) as group:
        assert group.world_size == 3


@pytest.mark.parametrize("process_on_nodes", [[], [0], [2, -1]])
def test_a_pool_without_processes_is_refused(process_on_nodes: list[int]) -> None:
    with pytest.raises(ResourceError, match="at least one process per node"):
        RayResourcePool(process_on_nodes)


def test_a_request_that_the_cluster_drops_is_named(ray_cluster: None) -> None:
    known = set(ray.util.placement_group_table())

    def drop() -> None:
        while not (requested := set(ray.util.placement_group_table()) - known):
            time.sleep(0.05)
        for group in requested:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))

    thread = Thread(target=drop)
    thread.start()
    try:
        with pytest.raises(ResourceError, match=r"dropped a request .* does not exist"):
            RayWorkerGroup(
                RayResourcePool([1], num_cpus_per_rank=100, wait_s=30), RayClassWithInitArgs(Scaler)
            )
    finally:
        thread.join()
