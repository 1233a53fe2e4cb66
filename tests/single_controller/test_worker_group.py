from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray

from hybridrl.errors import DispatchError, RemoteCallError, WorkerGroupError
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.single_controller.actors import rank_environments, rank_order
from hybridrl.single_controller.worker import Location
from tests.single_controller.workers import Closing, Napper, Scaler
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
def test_an_indivisible_batch_is_padded_only_if_the_method_pads(
    four_ranks: RayWorkerGroup,
) -> None:
    rows = np.arange(5)
    np.testing.assert_array_equal(four_ranks.answer_twice(rows), np.repeat(rows, 2))
    with pytest.raises(DispatchError, match="5 rows evenly over 4"):
        four_ranks.scale(rows)


def test_a_mesh_gives_peers_one_slice_and_hears_the_leaders(four_ranks: RayWorkerGroup) -> None:
    # Slices [0, 1] and [2, 3]; ranks 0 and 2 answer and add 0 and 200.
    assert four_ranks.generate(np.arange(4)).tolist() == [0, 1, 202, 203]


def test_a_mesh_that_no_rank_registered_is_an_error(four_ranks: RayWorkerGroup) -> None:
    with pytest.raises(DispatchError, match=r"ranks \[0, 1, 2, 3\] have not registered the mesh"):
        four_ranks.on_unknown_mesh(np.arange(4))


def test_all_to_all_hands_out_one_entry_per_rank(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.add_rank([10, 20, 30, 40]) == [10, 21, 32, 43]
    assert four_ranks.take_whole([1, 2, 3, 4]) == [[1, 2, 3, 4]] * 4  # as long as the world


def test_rank_zero_methods_run_on_rank_zero_alone(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.on_rank_zero(5) == (0, 5)
    assert four_ranks.seed().get() == 7


def test_a_dispatch_of_ones_own_splits_and_collects(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.own_dispatch(3) == 4 * 6


def test_any_public_method_can_be_executed_by_name(four_ranks: RayWorkerGroup) -> None:
    assert four_ranks.execute_all_sync("not_registered", 10) == [10, 11, 12, 13]
    assert four_ranks.execute_rank_zero_sync("not_registered", value=10) == 10
    assert four_ranks.execute_all("describe").get()[3]["rank"] == 3
    with pytest.raises(AttributeError, match="did you mean 'not_registered'"):
        four_ranks.execute_all("not_registred")


def test_a_mistyped_method_names_the_nearest(four_ranks: RayWorkerGroup) -> None:
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


def test_a_future_of_another_mesh_is_split_anew(four_ranks: RayWorkerGroup) -> None:
    later = four_ranks.scale_later(np.arange(4.0))  # four slices, the mesh has two
    assert four_ranks.generate(later).tolist() == [0, 3, 206, 209]


def test_a_padded_future_is_stripped_before_it_is_used(four_ranks: RayWorkerGroup) -> None:
    rows = np.arange(6)
    later = four_ranks.answer_twice_later(rows)
    np.testing.assert_array_equal(four_ranks.scale(later), np.repeat(rows, 2) * 3.0)


def test_futures_feed_modes_that_take_their_layout(
    four_ranks: RayWorkerGroup,
) -> None:
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


def test_the_environment_is_set_and_shutdown_leaves_nothing(
    ray_cluster: None, tmp_path: Path
) -> None:
    pool = RayResourcePool([2])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Scaler), env_vars={"FLAVOUR": "plum"})
    places = group.describe()
    assert {place["env"]["FLAVOUR"] for place in places} == {"plum"}
    for _ in range(2):
        group.shutdown()
    wait_until_gone(place["pid"] for place in places)
    states = [entry["state"] for entry in ray.util.placement_group_table().values()]
    assert states.count("REMOVED") >= 1
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
