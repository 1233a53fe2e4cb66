"""Resource pools: the bundles of CPUs or GPUs that worker groups run on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import ResourceError
from hybridrl.single_controller.placement import ResourceRequest, remove, reserve


class _Reservation:
    """Placement groups, one per node entry, held while any group runs on their bundles."""

    def __init__(self, request: ResourceRequest, max_colocated: int) -> None:
        self.max_colocated = max_colocated
        self._request = request
        self._placement_groups: list[Any] = []
        self._num_leases = [0] * sum(request.process_on_nodes)

    def lease(self, bundles: range, wait_s: float) -> list[dict[str, Any]]:
        if any(self._num_leases[index] >= self.max_colocated for index in bundles):
            raise ResourceError(
                f"{self.max_colocated} worker groups run on this pool already; shut one down, or "
                f"make the pool with RayResourcePool(max_colocate_count={self.max_colocated + 1})"
            )
        if not self._placement_groups:
            self._placement_groups = reserve(self._request, wait_s=wait_s)
        for index in bundles:
            self._num_leases[index] += 1
        bundle_of_rank = [
            (group, index)
            for group, count in zip(
                self._placement_groups, self._request.process_on_nodes, strict=True
            )
            for index in range(count)
        ]
        # Ray counts resources in ten-thousandths: rounded down, all shares fit into the bundle.
        share = {
            name: int(amount / self.max_colocated * 10_000) / 10_000
            for name, amount in self._request.bundle.items()
        }
        return [
            {
                "num_cpus": share["CPU"],
                "num_gpus": share.get("GPU", 0.0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            }
            for group, index in (bundle_of_rank[rank] for rank in bundles)
        ]

    def give_back(self, bundles: range) -> None:
        for index in bundles:
            self._num_leases[index] -= 1
        if not any(self._num_leases):
            self._remove()

    def _remove(self) -> None:
        remove(self._placement_groups)
        self._placement_groups = []


class RayResourcePool:
    """Bundles of resources, one per rank, that several worker groups can share.

    Nothing is reserved until the first group starts, nor after the last group has stopped.

    Args:
        process_on_nodes: ranks on each node: ``[8, 8]`` is two nodes with eight each. The ranks
            of one entry lie on one node.
        use_gpu: one GPU per rank, else CPUs alone.
        max_colocate_count: how many groups may share the pool; each takes that fraction.
        wait_s: seconds to wait for resources before `ResourceError`.
        is_spread: each entry gets a node of its own. Otherwise, as in verl, two entries may share
            one node with enough resources for both.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        use_gpu: bool = False,
        num_cpus_per_rank: float = 1.0,
        max_colocate_count: int = 10,
        wait_s: float = 30.0,
        is_spread: bool = False,
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1 or max_colocate_count < 1:
            raise ResourceError(
                f"a pool needs at least one process per node and one group, got process_on_nodes="
                f"{list(process_on_nodes)}, max_colocate_count={max_colocate_count}; "
                "use RayResourcePool(process_on_nodes=[1])"
            )
        bundle = {"CPU": num_cpus_per_rank} | ({"GPU": 1.0} if use_gpu else {})
        request = ResourceRequest(tuple(process_on_nodes), bundle, is_spread)
        reservation = _Reservation(request, max_colocate_count)
        self._parts = [(reservation, range(sum(process_on_nodes)))]
        self._wait_s = wait_s

    @property
    def world_size(self) -> int:
        """Number of bundles, which is the number of ranks of a group on the pool."""
        return sum(len(bundles) for _, bundles in self._parts)

    def split(self, sizes: Sequence[int]) -> list[RayResourcePool]:
        """Split the pool into consecutive pools of the given sizes, for groups side by side.

        Raises:
            ResourceError: the sizes do not add up to ``world_size``.
        """
        if sum(sizes) != self.world_size or min(sizes, default=0) < 1:
            raise ResourceError(
                f"cannot split {self.world_size} ranks into {list(sizes)}; "
                f"give positive sizes that add up to {self.world_size}"
            )
        single = [
            (reservation, range(index, index + 1))
            for reservation, bundles in self._parts
            for index in bundles
        ]
        edges = accumulate(sizes, initial=0)
        return [self._view(single[start:stop]) for start, stop in pairwise(edges)]

    def merge(self, other: RayResourcePool) -> RayResourcePool:
        """Return a pool over the bundles of both."""
        return self._view(self._parts + other._parts)

    def lease(self) -> list[dict[str, Any]]:
        """Reserve a share of every bundle for one group; waits at most ``wait_s``.

        Returns:
            The Ray options that place an actor on its bundle, by rank.

        Raises:
            ResourceError: too few resources, or ``max_colocate_count`` groups run here already.
        """
        options: list[dict[str, Any]] = []
        leased: list[tuple[_Reservation, range]] = []
        try:
            for reservation, bundles in self._parts:
                options += reservation.lease(bundles, self._wait_s)
                leased.append((reservation, bundles))
        except BaseException:
            for reservation, bundles in leased:
                reservation.give_back(bundles)
            raise
        return options

    def give_back(self) -> None:
        """End a lease. The last lease of all views of a pool removes its placement groups."""
        for reservation, bundles in self._parts:
            reservation.give_back(bundles)

    def _view(self, parts: list[tuple[_Reservation, range]]) -> RayResourcePool:
        view = RayResourcePool.__new__(RayResourcePool)
        view._parts = parts
        view._wait_s = self._wait_s
        return view
