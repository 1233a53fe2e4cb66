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

from hybridrl.disk import publish
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.flat_buffers import FlatBuffers, allocator_of, lay_out
from hybridrl.workers.rollout.protocol import Bucket, Offer, Slot
from hybridrl.workers.rollout.server import Server

Encode = Callable[[Tensor, Sequence[Slot]], str]
"""Makes the handle with which one rank of a server, and only one, opens a flat buffer, once."""


class Transport(Protocol):
    """One rank's share in feeding one server."""

    in_session: bool
    """Whether the server wants its update opened before the first bucket and closed at the end."""

    def offer(self, bucket: Bucket) -> Offer:
        """Make a bucket ready; see ``WeightPort.offer``."""
        ...

    def handle(self, offer: Offer) -> str:
        """Make another handle of an offer, for a rank whose process offers nothing itself."""
        ...

    def deliver(self, server: Server, offer: Offer, handles: Sequence[str]) -> None:
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

    def __init__(self, *, device: torch.device, num_ranks: int, encode: Encode) -> None:
        """Allocate nothing yet.

        Args:
            device: of this rank; the server's rank of the same number is on it too.
            num_ranks: of the server.
            encode: makes a handle.

        Raises:
            EngineError: this process allocates memory that cannot be shared.
        """
        # The answer of a server comes from its first rank, whose copies are done: torch waits for
        # them before it closes what it opened (torch/csrc/StorageSharing.cpp). Other ranks may
        # still copy, but have done so when the answer to the bucket after it comes.
        count = 2 if num_ranks == 1 else 3
        self._buffers = FlatBuffers(count=count, allocate=allocator_of(device))
        self._encode = encode

    def offer(self, bucket: Bucket) -> Offer:
        """Pack into shared memory."""
        flat, slots = self._buffers.pack(bucket)
        return Offer(slots, flat, self._encode(flat, slots))

    def handle(self, offer: Offer) -> str:
        """Make another handle of the same memory: each is counted down once when it is closed."""
        return "" if offer.flat is None else self._encode(offer.flat, offer.slots)

    def deliver(self, server: Server, offer: Offer, handles: Sequence[str]) -> None:
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
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Else blocks that were shared stay with the allocator.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Let go of all buffers."""
        self.free()


class DiskTransport:
    """Files, loaded in one go when all are there: the slowest, and the one that works anywhere."""

    in_session = False

    def __init__(self, *, leads: bool) -> None:
        """Write nothing yet; ``leads`` says whether this rank is the one that writes."""
        self._leads = leads
        # In memory of the host: the file is written from it while the next bucket is gathered.
        self._buffers = FlatBuffers(
            count=2, allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)
        )
        self._parent: Path | None = None
        self._written: set[str] = set()
        self._num_files = 0

    def offer(self, bucket: Bucket) -> Offer:
        """Copy to the host, on the leader."""
        if not self._leads:
            return Offer(lay_out(bucket), None, "")
        flat, slots = self._buffers.pack(bucket)
        return Offer(slots, flat, "")

    def handle(self, offer: Offer) -> str:
        """Files need none."""
        return ""

    def deliver(self, server: Server, offer: Offer, handles: Sequence[str]) -> None:
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
            publish(self._unfinished(self._parent), folder)
            server.require_success(
                "/update_weights_from_disk",
                model_path=str(folder),
                load_format="safetensors",  # the server was started with made-up weights
                flush_cache=False,
            )
        finally:
            self.forget()

    def free(self) -> None:
        """Let go of all buffers."""
        self._buffers.free()

    def forget(self) -> None:
        """Remove what was written."""
        if self._parent is not None:
            shutil.rmtree(self._parent, ignore_errors=True)
        self._parent, self._written, self._num_files = None, set(), 0

    @staticmethod
    def _unfinished(parent: Path) -> Path:
        return parent / "weights.unfinished"


def tensors_in(flat: Tensor, slots: Sequence[Slot]) -> dict[str, Tensor]:
    """Return views of the tensors in a flat buffer, by name."""
    return {
        slot.name: flat[slot.begin : slot.end].view(slot.dtype).view(slot.shape) for slot in slots
    }
