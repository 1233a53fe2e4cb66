from __future__ import annotations

import socket
import sys

import psutil
import pytest
import torch.distributed as dist

from hybridrl.network import interface_of, rendezvous_address
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)
from hybridrl.single_controller.worker import WorkerHost
from hybridrl.workers.checkpointed import end_process_group, start_process_group
from hybridrl.workers.sharding.control import ControlGroup


@pytest.mark.shows("4.7")
@pytest.mark.skipif(sys.platform != "linux", reason="how Linux reads SO_REUSEADDR")
def test_a_reserved_port_is_free_for_the_store_alone() -> None:
    host = WorkerHost()
    port = host.host_reserve_port()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("", port))
    for _ in range(2):  # the group can be built again on the same port
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        dist.TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
        assert store.get("key") == b"value"
        del store
    host.host_close()


class MeetingWorker(Worker):
    """Joins its group as the workers of a run do, with a control group beside it."""

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> list[str]:
        """Return the addresses that this process has begun to listen on."""
        before = _listening()
        start_process_group(device="cpu", local_rank=self.local_rank, timeout_s=60.0)
        self.control = ControlGroup(timeout_s=60.0)
        self.control.exchange("meet", None)
        return [address for address, port in _listening() - before]

    @register(Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        del self.control  # a group that is held holds the store
        end_process_group()


def _listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.shows("R8.1")
def test_ranks_of_one_node_listen_on_loopback_alone(ray_cluster: None) -> None:
    with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(MeetingWorker)) as group:
        for _ in range(2):  # the group can be built again on the same port
            of_first, of_second = group.join()
            assert set(of_first) == set(of_second) == {"127.0.0.1"}
            assert len(of_first) > len(of_second)  # the store
            group.leave()


@pytest.mark.shows("R8.1")
def test_ranks_of_several_nodes_meet_at_the_address_of_the_first() -> None:
    assert rendezvous_address("10.0.0.1", ["a", "b"]) == "10.0.0.1"
    assert rendezvous_address("10.0.0.1", ["a", "a"]) == "127.0.0.1"


@pytest.mark.shows("R8.1")
def test_the_interface_of_an_address_is_found_by_name() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        first = [one.address for one in addresses if one.family == socket.AF_INET][:1]
        assert [interface_of(address) for address in first] == [name] * len(first)
    assert interface_of("198.51.100.7") == ""  # of nobody: kept for documents
