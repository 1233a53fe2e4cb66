"""The process that holds rank 0 of a broadcast. It may be killed: that frees all receivers.

It reads the weights from memory of its parent. A receiver connects, and sends one line of JSON:
the key, the name of the transfer, and how many receivers it has. When all have come, each gets the
port of the store and its rank, and the broadcast begins. If it fails, the process ends: over gloo
nothing else frees receivers that wait for a bucket.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.json_text import to_json_text
from hybridrl.network import bind
from hybridrl.rewards.child import encode, receive
from hybridrl.workers.sharding.weight_broadcast import MAX_LINE, TransferGroup, make_group

HEADER_BYTES = mmap.PAGESIZE
"""Before the first bucket: the generation, as int64."""

_HELLO_S = 5.0
"""Seconds in which who connects must have sent its line."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One broadcast, and the receivers that have come so far."""

    order: dict[str, Any]
    receivers: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the receivers: those that got no rank give up."""
        for connection in self.receivers:
            connection.close()


class BroadcastSender:
    """Takes receivers in, and sends to one group at a time."""

    def __init__(self, *, memory: str, host: str, key: str, timeout_s: float) -> None:
        """Listen.

        Args:
            memory: file of the parent's memory.
            key: secret of the receivers.
            timeout_s: seconds that a group may take to form, and each broadcast.
        """
        self._memory, self._host, self._key, self._timeout_s = memory, host, key, timeout_s
        self._listener = bind(host)
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._gathering: Transfer | None = None
        self._sending: set[str] = set()
        self._given_up: set[str] = set()
        """Names of transfers whose last receivers may be on their way still."""
        self._thread = ThreadPoolExecutor(1)

    def run(self) -> None:
        """Serve for good."""
        while True:
            connection, _ = self._listener.accept()
            order = self._read(connection)
            if order is None or not self._take(connection, order):
                connection.close()

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        connection.settimeout(_HELLO_S)
        try:
            order: dict[str, Any] = json.loads(connection.makefile("rb").readline(MAX_LINE))
            is_known = hmac.compare_digest(str(order["key"]).encode(), self._key.encode())
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return order if is_known else None

    def _take(self, connection: socket.socket, order: dict[str, Any]) -> bool:
        """Return whether the connection is a receiver's that has to wait."""
        name = order["group"]
        if not order["num_receivers"]:  # the transfer is given up
            if name in self._sending:
                end("a receiver failed")
            self._given_up.add(name)
            self._forget(name)
            return False
        if name in self._given_up:
            return False
        if self._gathering is None or self._gathering.order["group"] != name:
            self._forget()
            self._gathering = Transfer(order)
        self._gathering.receivers.append(connection)
        if len(self._gathering.receivers) == order["num_receivers"]:
            transfer, self._gathering = self._gathering, None
            self._sending.add(name)
            self._thread.submit(self._try_to_send, transfer)
        return True

    def _forget(self, name: str = "") -> None:
        if self._gathering is not None and name in ("", self._gathering.order["group"]):
            self._gathering.close()
            self._gathering = None

    def _try_to_send(self, transfer: Transfer) -> None:
        try:
            self._send(transfer)
        except (RuntimeError, OSError, ValueError) as error:
            end(str(error))
        self._sending.discard(transfer.order["group"])
        transfer.close()

    def _send(self, transfer: Transfer) -> None:
        order, size = transfer.order, 1 + len(transfer.receivers)
        listening = bind(self._host)
        listening.listen(size)
        port: int = listening.getsockname()[1]
        store = dist.TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listening.detach(),  # the store closes it
        )
        for rank, connection in enumerate(transfer.receivers, start=1):
            connection.sendall(to_json_text({"port": port, "rank": rank}).encode() + b"\n")
        members = make_group(
            store,
            name=order["group"],
            host=self._host,
            rank=0,
            size=size,
            timeout_s=self._timeout_s,
        )
        group = TransferGroup(members, timeout_s=self._timeout_s)
        with Path(self._memory).open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        for begin, num_bytes in zip(order["offsets"], order["sizes"], strict=True):
            group.begin(memory[begin : begin + num_bytes])
            group.finish()
        group.begin(memory[:8].view(torch.int64).clone())
        group.finish()


def end(reason: str) -> None:
    """End this process at once; the kernel closes its connections."""
    sys.stderr.write(f"the sender of weights ends, and its receivers are freed: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def main(descriptor: int) -> None:
    """Serve until the parent ends this process, or a broadcast fails."""
    connection = socket.socket(fileno=descriptor)
    order = receive(connection)
    if order is None:
        return
    sender = BroadcastSender(**order["serve"])
    connection.sendall(encode({"call": order["call"], "text": str(sender.port)}))
    sender.run()
