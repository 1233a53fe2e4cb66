"""Addresses and interfaces on which a group's own sockets listen: as few as possible."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Door:
    """Where a server listens, and who gets in."""

    host: str = LOOPBACK  # address of this machine: loopback, or that in the cluster
    # that callers must send; empty: the server makes its own
    key: str = field(default="", repr=False)


_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFREQ = struct.Struct("16s2s2x4s16x")
"""struct ifreq with an IPv4 address: name of the interface, family and port, address."""


def rendezvous_address(host: str, node_ids: Collection[str]) -> str:
    """Return the rendezvous address: loopback on one node, else the first rank's ``host``."""
    return LOOPBACK if len(set(node_ids)) == 1 else host


def bind(address: str, port: int = 0) -> socket.socket:
    """Return a socket bound to this port of this address alone; 0 lets the kernel choose."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


def host_and_port(host: str, port: int) -> str:
    """Write an address for a URL; an IPv6 address in brackets."""
    try:
        is_v6 = ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:  # a name
        is_v6 = False
    return f"[{host.strip('[]')}]:{port}" if is_v6 else f"{host}:{port}"


def interface_of(address: str) -> str:
    """Return the network interface of an IPv4 address; empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            question = _IFREQ.pack(name.encode(), b"", b"")
            with suppress(OSError):  # the interface has no IPv4 address
                answer = _IFREQ.unpack(fcntl.ioctl(asking, _SIOCGIFADDR, question))
                if socket.inet_ntoa(answer[2]) == address:
                    return name
    return ""
