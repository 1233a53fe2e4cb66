"""Weights by broadcast, at the trainer: a copy in shared memory, and the process that sends it."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.diagnostics.processes import end_guarded, start_guarded_module
from hybridrl.errors import EngineError
from hybridrl.rewards.channel import Channel, ChannelClosed, Garbage, Refused
from hybridrl.workers.rollout.buckets import StagedBucket, TensorSpan, lay_out, tensors_in
from hybridrl.workers.sharding.weight_broadcast import WeightOffer
from hybridrl.workers.sharding.weight_sender_child import HEADER_BYTES

_CHILD = "hybridrl.workers.sharding.weight_sender_child"
_START_S = 120.0
_ANSWER_BYTES = 1 << 12


class WeightMemoryFile:
    """Buckets of one set of weights in memory that another process can map. It has no name.

    The first page has the number of the weights. It grows before any of them is overwritten, so who
    reads it after the last byte knows whether all bytes were of the same weights.
    """

    def __init__(self, *, dtype: torch.dtype) -> None:
        """Allocate one page.

        Args:
            dtype: of floating-point tensors: the engines', in which weights travel.
        """
        self._dtype = dtype
        self._descriptor = os.memfd_create("hybridrl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.buckets: list[tuple[TensorSpan, ...]] = []
        self.offsets: list[int] = []
        self.generation = 0
        self._end = HEADER_BYTES
        self._header = self._map(0, HEADER_BYTES)[:8].view(torch.int64)

    def begin(self) -> None:
        """Forget the weights: others are about to be written."""
        self.generation += 1
        self._header.fill_(self.generation)
        self.buckets, self.offsets, self._end = [], [], HEADER_BYTES

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Copy one bucket, staged by reference."""
        spans = lay_out(staged.tensors, dtype=self._dtype)
        views = tensors_in(self._map(self._end, spans[-1].end), spans)
        for name, tensor in staged.tensors:
            views[name].copy_(tensor.detach())
        self.buckets.append(spans)
        self.offsets.append(self._end)
        self._end += -(-spans[-1].end // mmap.PAGESIZE) * mmap.PAGESIZE

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)

    def _map(self, begin: int, num_bytes: int) -> Tensor:
        try:
            os.posix_fallocate(self._descriptor, begin, num_bytes)
            memory = mmap.mmap(self._descriptor, num_bytes, offset=begin)
        except OSError as error:
            raise EngineError(
                f"no {num_bytes / 2**20:.0f} MiB of shared memory for weights, after "
                f"{begin / 2**20:.0f} MiB: {error}; a broadcast needs memory for one copy of the "
                "model on the node of rank 0: set serving.weights=files, or give it more"
            ) from error
        return torch.frombuffer(memory, dtype=torch.uint8)


class WeightBroadcaster:
    """The weights of the trainer for any number of transfers, until others are written."""

    def __init__(self, *, host: str, dtype: torch.dtype, timeout_s: float) -> None:
        """Start no process yet.

        Args:
            host: address of this node that all receivers reach.
            timeout_s: seconds that a transfer may take (``rollout.stage_timeout_s``).
        """
        self._memory = WeightMemoryFile(dtype=dtype)
        self._host = host
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._port = 0
        self._key = secrets.token_hex(16)

    def begin(self) -> None:
        """Forget the weights before; see ``WeightMemoryFile``."""
        self._memory.begin()

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Copy one bucket; see ``WeightMemoryFile``."""
        self._memory.write(staged, handles)

    def source(self) -> WeightOffer:
        """Return where the written weights can be had; starts the sending process if none lives."""
        if self._process is None or self._process.poll() is not None:
            self.break_off()
            self._start()
        return WeightOffer(
            host=self._host,
            port=self._port,
            key=self._key,
            generation=self._memory.generation,
            buckets=tuple(self._memory.buckets),
            offsets=tuple(self._memory.offsets),
        )

    def break_off(self) -> None:
        """End the process: receivers that wait for it are freed. Weights stay. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            end_guarded(self._process)
        self._process = self._channel = None

    def end_update(self) -> None:
        """Keep process and weights: engines may be replaced before others are written."""

    def close(self) -> None:
        """End the process, and free the memory."""
        self.break_off()
        self._memory.close()

    def _start(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            self._process = start_guarded_module(_CHILD, child_end.fileno())
        self._channel = Channel(parent_end)
        order = {
            "memory": self._memory.path,
            "host": self._host,
            "key": self._key,
            "timeout_s": self._timeout_s,
        }
        try:
            self._channel.send({"serve": order}, timeout_s=_START_S)
            answer = self._channel.receive_text(max_bytes=_ANSWER_BYTES, timeout_s=_START_S)
        except (TimeoutError, ChannelClosed, Garbage, Refused) as error:
            self.break_off()
            raise EngineError(
                f"the process that sends weights did not start within {_START_S:g} s, or ended: "
                f"{error or type(error).__name__}; its reason is in the log of rank 0"
            ) from error
        self._port = int(answer)
