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
_SHARE = 0.1
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources that a pool requests."""

    process_on_nodes: tuple[int, ...]
    """Ranks of each node entry. Each entry gets a node of its own."""
    bundle: Mapping[str, float]
    """Resources of one rank."""

    def unmet_reason(self) -> str:
        """Return why even the idle cluster cannot hold this; empty if it can."""
        largest = max(self.process_on_nodes)
        capacities = [_capacity(node, self.bundle) for node in _alive_nodes()]
        if max(capacities, default=0) < largest:
            return f"no node has {_amounts(self.bundle, largest)}, which {largest} ranks need"
        wanted = sorted(self.process_on_nodes, reverse=True)
        pairs = zip(sorted(capacities, reverse=True), wanted, strict=False)
        num_placed = sum(capacity >= count for capacity, count in pairs)
        return f"only {num_placed} of {len(wanted)} fit" if num_placed < len(wanted) else ""

    def describe(self) -> str:
        """Name the resources that are asked for, those of each node, and those that are free."""
        free, nodes = ray.available_resources(), _alive_nodes()
        of_nodes = "; ".join(
            ", ".join(f"{node.get(name, 0):g} {name}" for name in self.bundle) for node in nodes
        )
        return (
            f"{list(self.process_on_nodes)} ranks per node, on different nodes, "
            f"{_amounts(self.bundle)} a rank; nodes have {of_nodes}; free in the cluster are "
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
            group = _start_request(request, count, avoid=taken)
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


def _start_request(request: ResourceRequest, count: int, *, avoid: Sequence[str]) -> Any:  # noqa: ANN401 - Ray's
    # STRICT_SPREAD spreads the bundles of one group, but ranks of an entry must share a node. So
    # each entry gets a group, kept off the nodes of the earlier ones.
    selector = {_NODE_ID: f"!in({','.join(avoid)})"} if avoid else None
    return placement_group(
        [dict(request.bundle)] * count,
        strategy="STRICT_PACK",
        bundle_label_selector=[selector] * count if selector else None,
    )


def _wait(group: Any, request: ResourceRequest, *, deadline_s: float, wait_s: float) -> None:  # noqa: ANN401
    pause_s = 1.0  # an idle cluster needs 10 ms
    while (left_s := deadline_s - time.monotonic()) > 0:
        if _is_ready(group, math.ceil(min(pause_s, left_s))):  # Ray drops the fraction
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


def _is_ready(group: Any, wait_s: int) -> bool:  # noqa: ANN401
    try:
        return bool(group.wait(wait_s))
    except Exception as error:  # Ray has no exception class for it
        raise ResourceError(
            f"the cluster dropped a request for resources that the driver waited for: {error} Ray "
            "does that when it loses the node of the driver; look at `ray status`, then start "
            "the run again"
        ) from error


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
    """Bundles of resources, one per rank of a worker group; reserved while the group runs.

    Args:
        process_on_nodes: ranks on each node: ``[8, 8]`` is two nodes with eight each. Other than
            in verl, two entries never share a node.
        use_gpu: one GPU per rank, else CPUs alone.
        wait_s: seconds to wait for resources before `ResourceError`.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        use_gpu: bool = False,
        num_cpus_per_rank: float = 1.0,
        wait_s: float = 30.0,
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ResourceError(
                "a pool needs at least one process per node, got process_on_nodes="
                f"{list(process_on_nodes)}; use RayResourcePool(process_on_nodes=[1])"
            )
        bundle = {"CPU": num_cpus_per_rank} | ({"GPU": 1.0} if use_gpu else {})
        self._request = ResourceRequest(tuple(process_on_nodes), bundle)
        self._wait_s = wait_s
        self._placement_groups: list[Any] = []  # one per node entry, while the group runs

    def lease(self) -> list[dict[str, Any]]:
        """Reserve the bundles; waits at most ``wait_s``.

        Returns:
            The Ray options that place an actor on its bundle, by rank. It takes a share, so that
            the next one starts while it ends.
        """
        self._placement_groups = reserve(self._request, wait_s=self._wait_s)
        bundle = self._request.bundle
        return [
            {
                "num_cpus": bundle["CPU"] * _SHARE,
                "num_gpus": bundle.get("GPU", 0.0) * _SHARE,
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
        """Remove the placement groups."""
        _remove(self._placement_groups)
        self._placement_groups = []
