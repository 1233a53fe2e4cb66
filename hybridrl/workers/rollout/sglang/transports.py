"""How buckets of weights get into a server: one class per value of ``rollout.transport``.

Every rank of an engine has one; ``deliver`` and ``finish`` are the leader's. What a bucket looks
like to SGLang is said by functions that are handed in.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.atomic_io import rename_into_place
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import Bucket, StagedBucket, TensorSpan
from hybridrl.workers.rollout.sglang.flat_buffers import (
    Allocate,
    FlatBuffers,
    allocator_of,
    lay_out,
    tensors_in,
)
from hybridrl.workers.rollout.sglang.server import Server

Encode = Callable[[Tensor, Sequence[TensorSpan]], str]
"""Makes the handle with which one rank of a server, and only one, opens a flat buffer, once."""


class Transport(Protocol):
    """One rank's share in feeding one server."""

    in_session: bool
    """Whether the server wants its update opened before the first bucket and closed at the end."""

    def offer(self, bucket: Bucket) -> StagedBucket:
        """Make a bucket ready; see ``WeightSender.offer``."""
        ...

    def handle(self, offer: StagedBucket) -> str:
        """Make another handle of an offer, for a rank whose process offers nothing itself."""
        ...

    def deliver(self, server: Server, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Have ``server`` load a bucket, or what it needs in order to."""
        ...

    def finish(self, server: Server) -> None:
        """All buckets have been delivered. Without any since the last time it does nothing."""
        ...

    def free(self) -> None:
        """Let go of all buffers. Idempotent."""
        ...

    def forget(self) -> None:
        """The server is gone, or about to be. Idempotent."""
        ...


class SharedTransport:
    """Memory that both map: CUDA IPC on a GPU, POSIX shared memory on a CPU."""

    in_session = True

    def __init__(
        self, *, device: torch.device, num_ranks: int, encode: Encode, dtype: torch.dtype
    ) -> None:
        """Allocate nothing yet.

        Args:
            device: of this rank; the server's rank of the same number is on it too.
            num_ranks: of the server.
            encode: makes a handle.
            dtype: of the server's weights, in which they travel.

        Raises:
            EngineError: this process allocates memory that cannot be shared.
        """
        # The answer of a server comes from its first rank, whose copies are done: torch waits for
        # them before it closes what it opened (torch/csrc/StorageSharing.cpp). Other ranks may
        # still copy, but have done so when the answer to the bucket after it comes.
        count = 2 if num_ranks == 1 else 3
        self._buffers = FlatBuffers(count=count, allocate=allocator_of(device), dtype=dtype)
        self._encode = encode

    def offer(self, bucket: Bucket) -> StagedBucket:
        """Pack into shared memory."""
        flat, slots = self._buffers.pack(bucket)
        return StagedBucket(slots, flat, self._encode(flat, slots))

    def handle(self, offer: StagedBucket) -> str:
        """Make another handle of the same memory: each is counted down once when it is closed."""
        return "" if offer.flat is None else self._encode(offer.flat, offer.slots)

    def deliver(self, server: Server, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Send the handles."""
        server.require_success(
            "/update_weights_from_tensor",
            serialized_named_tensors=list(handles),
            load_format="flattened_bucket",
            flush_cache=False,
        )

    def finish(self, server: Server) -> None:
        """Nothing is left to do."""

    def free(self) -> None:
        """Let go of all buffers."""
        self._buffers.free()

    def forget(self) -> None:
        """Let go of all buffers."""
        self.free()


class LeaderBuffers:
    """What transports have in common whose leader alone hands bytes on, and without a handle.

    Args:
        leads: whether this rank is the one.
        allocate: makes memory that is read while the next bucket is gathered.
        dtype: of the server's weights, in which they travel.
    """

    def __init__(self, *, leads: bool, allocate: Allocate, dtype: torch.dtype) -> None:
        self._leads = leads
        self._dtype = dtype
        self._buffers = FlatBuffers(count=2, allocate=allocate, dtype=dtype)

    def offer(self, bucket: Bucket) -> StagedBucket:
        """Pack, on the leader."""
        if not self._leads:
            return StagedBucket(lay_out(bucket, dtype=self._dtype), None, "")
        flat, slots = self._buffers.pack(bucket)
        return StagedBucket(slots, flat, "")

    def handle(self, offer: StagedBucket) -> str:
        """None is needed."""
        return ""

    def free(self) -> None:
        """Let go of all buffers."""
        self._buffers.free()


class DiskTransport(LeaderBuffers):
    """Files, loaded in one go when all are there: the slowest, and the one that works anywhere."""

    in_session = False

    def __init__(self, *, leads: bool, dtype: torch.dtype) -> None:
        """Write nothing yet.

        Args:
            leads: whether this rank is the one that writes.
            dtype: of the server's weights.
        """
        super().__init__(leads=leads, allocate=_on_the_host, dtype=dtype)
        self._parent: Path | None = None
        self._written: set[str] = set()
        self._num_files = 0

    def deliver(self, server: Server, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Write a file.

        Raises:
            EngineError: there is no room for it.
        """
        if offer.flat is None:
            return
        if not self._written.isdisjoint(slot.name for slot in offer.slots):
            self.forget()  # what is left of a sync that was torn
        self._parent = self._parent or Path(tempfile.mkdtemp(prefix="hybridrl-weights-"))
        unfinished = self._unfinished(self._parent)
        unfinished.mkdir(exist_ok=True)
        file = unfinished / f"bucket-{self._num_files:05}.safetensors"
        try:
            save_file(tensors_in(offer.flat, offer.slots), file)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._parent).free
            self.forget()
            raise EngineError(
                f"a bucket of {len(offer.flat) / 2**20:.1f} MiB could not be written to {file}, "
                f"where {free / 2**20:.1f} MiB are free: {error}; point TMPDIR at a larger disk, "
                "or set rollout.transport=shared"
            ) from error
        self._num_files += 1
        self._written |= {slot.name for slot in offer.slots}

    def finish(self, server: Server) -> None:
        """Give the folder its name and have the server load it; it is removed afterwards."""
        if self._parent is None:
            return
        folder = self._parent / "weights"
        try:
            rename_into_place(self._unfinished(self._parent), folder)
            server.require_success(
                "/update_weights_from_disk",
                model_path=str(folder),
                load_format="safetensors",  # the server was started with made-up weights
                flush_cache=False,
            )
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove what was written."""
        if self._parent is not None:
            shutil.rmtree(self._parent, ignore_errors=True)
        self._parent, self._written, self._num_files = None, set(), 0

    @staticmethod
    def _unfinished(parent: Path) -> Path:
        return parent / "weights.unfinished"


def _on_the_host(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
