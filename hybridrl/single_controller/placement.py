"""Reserve resources for a pool, and say which are missing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

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
        capacities = [_capacity(node, self.bundle) for node in _alive_nodes()]
        if max(capacities, default=0) < largest:
            return f"no node has {_amounts(self.bundle, largest)}, which {largest} ranks need"
        num_placed = self._num_placed(capacities)
        if num_placed < len(self.process_on_nodes):
            return f"only {num_placed} of {len(self.process_on_nodes)} fit"
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

    def _num_placed(self, capacities: Sequence[int]) -> int:
        """Put the largest entry first, each on the smallest node that holds it."""
        free = list(capacities)
        for num_placed, count in enumerate(sorted(self.process_on_nodes, reverse=True)):
            fitting = [capacity for capacity in free if capacity >= count]
            if not fitting:
                return num_placed
            free.remove(min(fitting))
            free.append(0 if self.is_spread else min(fitting) - count)
        return len(self.process_on_nodes)


def reserve(request: ResourceRequest, *, wait_s: float) -> list[Any]:
    """Return one placement group per node entry, all of them ready.

    Missing resources are named at once and every 5 s, because a node may join, or another run end.

    Raises:
        ResourceError: not enough resources within ``wait_s`` seconds; nothing stays reserved.
    """
    deadline_s = time.monotonic() + wait_s
    groups: list[Any] = []
    taken: list[str] = []
    try:
        for count in request.process_on_nodes:
            group = _start_request(request, count, avoid=taken if request.is_spread else [])
            groups.append(group)
            _wait(group, request, deadline_s=deadline_s, wait_s=wait_s)
            taken += set(placement_group_table(group)["bundles_to_node_id"].values())
    except BaseException:
        remove(groups)
        raise
    return groups


def remove(groups: Sequence[Any]) -> None:
    """Give the resources of placement groups back."""
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
