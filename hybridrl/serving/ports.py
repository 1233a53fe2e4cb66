"""Ports and addresses of engines: no two listeners of a node get the same port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.errors import ResourceError
from hybridrl.network import host_and_port
from hybridrl.serving.plan import EnginePlan, GroupPlan

_NUM_DIST_INIT = 31
"""Consecutive ports that SGLang counts up from the port of ``dist_init_addr``: 30, and one for each
data-parallel rank of an engine, of which there is one."""

_LAST_PORT = 65_535


class PortCursor:
    """Deals out the free ports of one node, upwards, each once."""

    def __init__(self, node: str, *, first: int, is_free: Callable[[int], bool]) -> None:
        """Begin at a port.

        Args:
            node: address, for messages.
            first: lowest port to deal out.
            is_free: whether nothing listens on a port of the node.
        """
        self._node = node
        self._next = self._first = first
        self._is_free = is_free

    def take(self, count: int = 1) -> int:
        """Take consecutive ports; return the lowest.

        Raises:
            ResourceError: not so many are free in a row.
        """
        begin = end = self._next
        while end - begin < count:
            if end > _LAST_PORT:
                raise ResourceError(
                    f"node {self._node} has no {count} free ports in a row from {self._first} on; "
                    "end what listens there"
                )
            end += 1
            if not self._is_free(end - 1):
                begin = end
        self._next = end
        return begin


@dataclass(frozen=True, slots=True)
class EngineListeners:
    """Where the processes of one engine meet and listen."""

    hosts: tuple[str, ...]
    """Address of each of its nodes."""

    port: int
    """Of HTTP, on the first node."""

    nccl_ports: tuple[int, ...]
    """One on each node."""

    dist_init_port: int
    """First of the consecutive ports of the rendezvous, on the first node."""

    bootstrap_port: int | None
    """Where decode engines fetch the entries of a prefill engine, on the first node; None for other
    types."""

    @property
    def url(self) -> str:
        """Base URL of HTTP."""
        return f"http://{host_and_port(self.hosts[0], self.port)}"

    @property
    def dist_init_addr(self) -> str:
        """Address of the rendezvous of its processes."""
        return host_and_port(self.hosts[0], self.dist_init_port)


def assign_addresses(
    group: GroupPlan,
    hosts: Sequence[str],
    cursors: Mapping[str, PortCursor],
) -> tuple[EngineListeners, ...]:
    """Give each engine of a group its addresses and ports, in order.

    Args:
        hosts: address of each node, by the node's index.
        cursors: of each address; shared by all groups, so that no port is dealt out twice.

    Raises:
        ResourceError: a node lacks free ports.
    """

    def address_of(engine: EnginePlan) -> EngineListeners:
        of_engine = tuple(hosts[part.node] for part in engine.slices)
        first = cursors[of_engine[0]]
        return EngineListeners(
            hosts=of_engine,
            port=first.take(),
            nccl_ports=tuple(cursors[host].take() for host in of_engine),
            dist_init_port=first.take(_NUM_DIST_INIT),
            bootstrap_port=first.take() if group.worker_type == "prefill" else None,
        )

    return tuple(address_of(engine) for engine in group.engines)
