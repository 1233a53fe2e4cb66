from __future__ import annotations

import time
from threading import Thread

import numpy as np
import pytest
import ray
from ray import PlacementGroupID
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from hybridrl.errors import ResourceError
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.single_controller.workers import Scaler


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


def test_entries_of_a_pool_are_reserved_separately(ray_cluster: None) -> None:
    pool = RayResourcePool([1, 2], num_cpus_per_rank=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)) as group:
        assert pool.world_size == 3
        assert [place["rank"] for place in group.describe()] == [0, 1, 2]


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
    pool = RayResourcePool([1], max_colocate_count=1)
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)),
        pytest.raises(ResourceError, match="max_colocate_count=2"),
    ):
        RayWorkerGroup(pool, RayClassWithInitArgs(Scaler))
    with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)) as group:
        assert group.world_size == 1


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
                RayResourcePool([1], num_cpus_per_rank=100, wait_s=30),
                RayClassWithInitArgs(Scaler),
            )
    finally:
        thread.join()
