"""Resource pools: the bundles of CPUs or GPUs that worker groups run on; actors: ``actors.py``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import ResourceError

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources that a pool requests."""

    process_on_nodes: tuple[int, ...]
    """Ranks of each node entry."""
    bundle: Mapping[str, float]
    """Resources of one rank."""
    is_spread: bool
    """Whether each entry needs a node of its own."""

    def unmet_reason(self) -> str:
        """Return why even the idle cluster cannot hold this; empty if it can."""
        largest = max(self.process_on_nodes)
        free = [_capacity(node, self.bundle) for node in _alive_nodes()]
        if max(free, default=0) < largest:
            return f"no node has {_amounts(self.bundle, largest)}, which {largest} ranks need"
        # The largest entry first, each on the smallest node that holds it.
        for num_placed, count in enumerate(sorted(self.process_on_nodes, reverse=True)):
            fitting = [capacity for capacity in free if capacity >= count]
            if not fitting:
                return f"only {num_placed} of {len(self.process_on_nodes)} fit"
            free.remove(min(fitting))
            free.append(0 if self.is_spread else min(fitting) - count)
        return ""

    def describe(self) -> str:
        """Name the resources that are asked for, those of each node, and those that are free."""
        free, nodes = ray.available_resources(), _alive_nodes()
        of_nodes = "; ".join(
            ", ".join(f"{node.get(name, 0):g} {name}" for name in self.bundle) for node in nodes
        )
        where = ", on different nodes" if self.is_spread else ""
        return (
            f"{list(self.process_on_nodes)} ranks per node{where}, {_amounts(self.bundle)} a rank; "
            f"nodes have {of_nodes}; free in the cluster are "
            + ", ".join(f"{free.get(name, 0.0):g} {name}" for name in self.bundle)
        )


def reserve(request: ResourceRequest, *, wait_s: float) -> list[Any]:
    """Return one placement group per node entry, all of them ready; else nothing stays reserved.

    Missing resources are named at once and every 5 s, because a node may join, or another run end.
    """
    deadline_s = time.monotonic() + wait_s
    groups: list[Any] = []
    taken: list[str] = []
    try:
        for count in request.process_on_nodes:
            # STRICT_SPREAD spreads the bundles of one group, but ranks of an entry must share a
            # node. So each entry gets a group, kept off the nodes of the earlier ones.
            selector = (
                {_NODE_ID: f"!in({','.join(taken)})"} if request.is_spread and taken else None
            )
            group = placement_group(
                [dict(request.bundle)] * count,
                strategy="STRICT_PACK",
                bundle_label_selector=[selector] * count if selector else None,
            )
            groups.append(group)
            _wait(group, request, deadline_s=deadline_s, wait_s=wait_s)
            taken += set(placement_group_table(group)["bundles_to_node_id"].values())
    except BaseException:
        _remove(groups)
        raise
    return groups


def _remove(groups: Sequence[Any]) -> None:
    for group in groups:
        remove_placement_group(group)


def _wait(group: Any, request: ResourceRequest, *, deadline_s: float, wait_s: float) -> None:  # noqa: ANN401
    pause_s = 1.0  # an idle cluster needs 10 ms
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            is_ready = group.wait(math.ceil(min(pause_s, left_s)))  # Ray drops the fraction
        except Exception as error:  # Ray has no exception class for it
            raise ResourceError(
                f"the cluster dropped a request for resources that the driver waited for: {error} "
                "Ray does that when it loses the node of the driver; look at `ray status`, then "
                "start the run again"
            ) from error
        if is_ready:
            return
        pause_s = _PROGRESS_S
        if (waited_s := wait_s - deadline_s + time.monotonic()) < wait_s:
            cause = request.unmet_reason() or "other runs hold the resources"
            line = "waiting for resources, %.0f of %g s: %s; wanted are %s"
            log.warning(line, waited_s, wait_s, cause, request.describe())
    raise ResourceError(
        f"could not reserve within {wait_s:g} s: {request.describe()}; "
        f"{request.unmet_reason() or 'other runs hold the resources'}; "
        "lower cluster.num_nodes or cluster.num_ranks_per_node, add nodes, free resources, or "
        "raise cluster.start_timeout_s (in code: process_on_nodes and wait_s of the pool)"
    )


def _alive_nodes() -> list[dict[str, float]]:
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _capacity(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many ranks a node holds; Ray counts in ten-thousandths."""
    return min(
        round(node.get(name, 0.0) * 10_000) // max(1, round(amount * 10_000))
        for name, amount in bundle.items()
    )


def _amounts(bundle: Mapping[str, float], count: int = 1) -> str:
    return ", ".join(f"{amount * count:g} {name}" for name, amount in bundle.items())


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
        self._request = ResourceRequest(tuple(process_on_nodes), bundle, is_spread)
        self._max_colocated = max_colocate_count
        self._wait_s = wait_s
        self._placement_groups: list[Any] = []  # one per node entry, while any group runs
        self._num_leases = 0

    @property
    def world_size(self) -> int:
        """Number of bundles, which is the number of ranks of a group on the pool."""
        return sum(self._request.process_on_nodes)

    def lease(self) -> list[dict[str, Any]]:
        """Reserve a share of every bundle for one group, and return the Ray options by rank."""
        if self._num_leases >= self._max_colocated:
            raise ResourceError(
                f"{self._max_colocated} worker groups run on this pool already; shut one down, or "
                f"make the pool with RayResourcePool(max_colocate_count={self._max_colocated + 1})"
            )
        if not self._placement_groups:
            self._placement_groups = reserve(self._request, wait_s=self._wait_s)
        self._num_leases += 1
        # Ray counts resources in ten-thousandths: rounded down, all shares fit into the bundle.
        share = {
            name: int(amount / self._max_colocated * 10_000) / 10_000
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
            for group, count in zip(
                self._placement_groups, self._request.process_on_nodes, strict=True
            )
            for index in range(count)
        ]

    def give_back(self) -> None:
        """End a lease. The last one removes the placement groups."""
        self._num_leases -= 1
        if not self._num_leases:
            _remove(self._placement_groups)
            self._placement_groups = []
