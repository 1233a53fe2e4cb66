"""Which transport a rank uses for its share of the weight stream into a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.multiprocessing

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import PhaseError
from hybridrl.models.dtypes import DTYPES
from hybridrl.workers.rollout.protocol import Bucket, StagedBucket
from hybridrl.workers.rollout.sglang.broadcast import BroadcastTransport, JoinGroup
from hybridrl.workers.rollout.sglang.transports import (
    DiskTransport,
    Encode,
    SharedTransport,
    Transport,
)


@dataclass(frozen=True, slots=True)
class SGLangHooks:
    """What the server's own library must do in our process, so that both understand each other."""

    encode: Encode
    """Makes a handle of a flat buffer."""

    join: JoinGroup
    """Makes our end of a process group."""

    prepare_ipc: Callable[[], None]
    """Lets handles name a GPU by its serial number: a server numbers only those that it sees."""


class FollowerSender:
    """The end of the weight stream on a rank that does not lead its engine."""

    def __init__(self, transport: Transport) -> None:
        """Offer by ``transport``."""
        self._transport = transport

    def offer(self, bucket: Bucket) -> StagedBucket:
        """Make this rank's share of a bucket ready."""
        return self._transport.offer(bucket)

    def deliver(self, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Refuse: the leader delivers.

        Raises:
            PhaseError: always.
        """
        raise PhaseError("a rank that leads no engine delivers nothing")

    def release_buffers(self) -> None:
        """Let go of all buffers."""
        self._transport.free()


def build_transport(
    rollout: RolloutConfig, dialect: SGLangHooks, *, device: torch.device, leads: bool
) -> Transport:
    """Make what ``rollout.transport`` asks for, on one rank.

    Args:
        rollout: the rollout section.
        dialect: of the server.
        device: of this rank.
        leads: whether this rank leads its engine.

    Raises:
        EngineError: this process cannot share its memory.
    """
    # Handles of host memory are names then, which a server's ranks can open that are no children of
    # ours: buckets on a CPU, adapters everywhere.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        dialect.prepare_ipc()
    num_ranks, dtype = rollout.tensor_parallel_size, DTYPES[rollout.dtype]
    if rollout.transport == "disk":
        return DiskTransport(leads=leads, dtype=dtype)
    if rollout.transport == "broadcast":
        return BroadcastTransport(
            device=device,
            leads=leads,
            num_ranks=num_ranks,
            timeout_s=rollout.stage_timeout_s,
            join=dialect.join,
            dtype=dtype,
        )
    return SharedTransport(device=device, num_ranks=num_ranks, encode=dialect.encode, dtype=dtype)
