"""How buckets of weights reach a server: one class per value of ``rollout.transport``.

Every rank of an engine has one; only the engine's own rank calls ``load`` and ``finish``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.atomic_io import rename_into_place
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.buckets import (
    Allocate,
    Bucket,
    FlatBuffers,
    StagedBucket,
    TensorSpan,
    allocator_of,
    lay_out,
    tensors_in,
)
from hybridrl.workers.rollout.sglang.server_calls import ServerCalls

Encode = Callable[[Tensor, Sequence[TensorSpan]], str]
"""Makes the handle with which one rank of a server, and only one, opens a flat buffer, once."""


class Transport:
    """One rank's end of the stream to one server: copies buckets to flat buffers for the server.

    Memory, on a rank that copies: the bucket that is gathered and ``count`` flat ones.
    """

    in_session = True
    """Whether the server needs its update opened before the first bucket and closed at the end."""

    def __init__(
        self,
        *,
        stages_bytes: bool,
        allocate: Allocate,
        dtype: torch.dtype,
        count: int = 2,
        encode: Encode | None = None,
    ) -> None:
        """Allocate nothing yet.

        Args:
            stages_bytes: whether this rank's bytes are needed.
            allocate: makes memory that is read while the next bucket is gathered.
            dtype: of the server's weights, in which they travel.
            count: buckets that stay readable at the same time.
            encode: makes handles; None if the server needs none.
        """
        self._stages_bytes = stages_bytes
        self._dtype = dtype
        self._buffers = FlatBuffers(count=count, allocate=allocate, dtype=dtype)
        self._encode = encode

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage this rank's bytes of a bucket; see ``WeightSender``."""
        if not self._stages_bytes:
            return StagedBucket(spans=lay_out(bucket, dtype=self._dtype))
        flat, spans = self._buffers.pack(bucket)
        make_handle = str if self._encode is None else partial(self._encode, flat, spans)
        return StagedBucket(spans=spans, flat=flat, make_handle=make_handle)

    def load(self, server: ServerCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Let ``server`` load a bucket, or make the preparations for it.

        Raises:
            EngineError: the server refuses, or is gone.
            DeadlineError: it does not answer.
        """
        raise NotImplementedError

    def finish(self, server: ServerCalls) -> None:
        """All buckets were loaded. Without any since the last time it does nothing."""

    def release_buffers(self) -> None:
        """Release all buffers. Idempotent."""
        self._buffers.free()

    def forget(self) -> None:
        """The server is gone, or about to be. Idempotent."""
        self.release_buffers()


class SharedTransport(Transport):
    """Memory that both map: CUDA IPC on a GPU, POSIX shared memory on a CPU."""

    def __init__(
        self, *, device: torch.device, num_ranks: int, encode: Encode, dtype: torch.dtype
    ) -> None:
        """Allocate nothing yet.

        Args:
            device: of this rank; the server's rank of the same number is on it too.

        Raises:
            EngineError: this process allocates memory that cannot be shared.
        """
        # A server answers from its first rank, whose copies are done: torch waits for them before
        # it closes the opened memory (torch/csrc/StorageSharing.cpp). Other ranks may still copy,
        # but have finished when the server answers the next bucket.
        super().__init__(
            stages_bytes=True,
            allocate=allocator_of(device),
            dtype=dtype,
            count=2 if num_ranks == 1 else 3,
            encode=encode,
        )

    def load(self, server: ServerCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Send the handles."""
        server.require_success(
            "/update_weights_from_tensor",
            serialized_named_tensors=list(handles),
            load_format="flattened_bucket",
            flush_cache=False,
        )


class DiskTransport(Transport):
    """Files, loaded at once when all are written: the slowest way, and one that always works."""

    in_session = False

    def __init__(self, *, is_sender: bool, dtype: torch.dtype) -> None:
        """Write nothing yet.

        Args:
            is_sender: whether this rank is the one that writes.
        """
        super().__init__(stages_bytes=is_sender, allocate=on_the_host, dtype=dtype)
        self._parent: Path | None = None
        self._written: set[str] = set()
        self._num_files = 0

    def load(self, server: ServerCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write a file.

        Raises:
            EngineError: the disk lacks space for it.
        """
        if staged.flat is None:
            return
        if not self._written.isdisjoint(span.name for span in staged.spans):
            self.forget()  # files of an interrupted sync
        self._parent = self._parent or Path(tempfile.mkdtemp(prefix="hybridrl-weights-"))
        unfinished = self._unfinished(self._parent)
        unfinished.mkdir(exist_ok=True)
        file = unfinished / f"bucket-{self._num_files:05}.safetensors"
        try:
            save_file(tensors_in(staged.flat, staged.spans), file)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._parent).free
            self.forget()
            raise EngineError(
                f"a bucket of {len(staged.flat) / 2**20:.1f} MiB could not be written to {file}, "
                f"where {free / 2**20:.1f} MiB are free: {error}; point TMPDIR at a larger disk, "
                "or set rollout.transport=shared"
            ) from error
        self._num_files += 1
        self._written |= {span.name for span in staged.spans}

    def finish(self, server: ServerCalls) -> None:
        """Give the folder its final name and let the server load it; it is removed afterwards."""
        if self._parent is None:
            return
        folder = self._parent / "weights"
        try:
            rename_into_place(self._unfinished(self._parent), folder)
            # Named, because the server was started with made-up weights.
            server.load_folder(folder, load_format="safetensors")
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove the written files."""
        if self._parent is not None:
            shutil.rmtree(self._parent, ignore_errors=True)
        self._parent, self._written, self._num_files = None, set(), 0

    @staticmethod
    def _unfinished(parent: Path) -> Path:
        return parent / "weights.unfinished"


def on_the_host(num_bytes: int) -> Tensor:
    """Allocate host memory that no other process opens."""
    return torch.empty(num_bytes, dtype=torch.uint8)
