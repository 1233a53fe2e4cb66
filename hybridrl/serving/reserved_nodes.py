"""The nodes that are reserved for engines, and the error if one is lost for good."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table

from hybridrl.errors import ResourceError


@dataclass(frozen=True, slots=True)
class ReservedNode:
    """Reserved resources of one process. If their node is lost, Ray looks for another one."""

    reservation: Any
    """Ray's placement group; the resources of all its bundles lie on one node."""

    host: str
    """Address of the node that it was on when the run started."""

    wait_s: float
    """Seconds to wait for another node that joins the cluster."""

    def missing(self) -> Future[None]:
        """Return a future that fails if there is no node for the process; else it never ends.

        Raises:
            ResourceError: by the future: names the lost node, and what to do.
        """
        answer: Future[None] = Future()

        def watch() -> None:
            try:
                # Ray drops the fraction
                has_node = bool(self.reservation.wait(math.ceil(self.wait_s)))
            except Exception as error:  # Ray has no class for a reservation that it dropped
                answer.set_exception(error)
                return
            if not has_node:
                answer.set_exception(self._error())

        threading.Thread(target=watch, name="reserved node", daemon=True).start()
        return answer

    def _error(self) -> ResourceError:
        return ResourceError(
            f"its node {self.host} is lost, and no other one has free resources for it: none "
            f"joined within cluster.start_timeout_s={self.wait_s:g} s. Start Ray there again, "
            "or on another one, and resume the run; or resume it with fewer devices: "
            "serving.num_devices_per_node, cluster.num_nodes, and num_devices of the groups"
        )


def find_reserved_nodes(
    placements: Sequence[Mapping[str, Any]], *, wait_s: float
) -> dict[int, ReservedNode]:
    """Return the nodes of processes that Ray starts with these options, by their index.

    Those without a reservation have none. Ask while the nodes are there: afterwards nobody knows
    their addresses.

    Args:
        placements: options of each process.
        wait_s: see ``ReservedNode``.
    """
    strategies = {
        index: options["scheduling_strategy"]
        for index, options in enumerate(placements)
        if "scheduling_strategy" in options
    }
    if not strategies:
        return {}
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = {}
    for index, strategy in strategies.items():
        of_bundles = placement_group_table(strategy.placement_group)["bundles_to_node_id"]
        host = hosts[of_bundles[strategy.placement_group_bundle_index]]
        nodes[index] = ReservedNode(strategy.placement_group, host, wait_s)
    return nodes
