"""How buckets of weights reach a rank's own server: one class per value of ``rollout.transport``.

Servers on devices of their own: ``broadcast.py`` and ``workers/sharding/publishing.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.workers.rollout.buckets import (
    Bucket,
    FlatBuffers,
    StagedBucket,
    TensorSpan,
    allocator_of,
    lay_out,
)
from hybridrl.workers.rollout.sglang.server import ControlCalls
from hybridrl.workers.rollout.weight_folder import WeightFolder

Encode = Callable[[Tensor, Sequence[TensorSpan]], str]
"""Makes the handle with which one rank of a server, and only one, opens a flat buffer, once."""


class Transport:
    """One rank's end of the stream to one server; only the engine's own rank loads."""

    in_session = True
    """Whether the server needs its update opened before the first bucket and closed at the end."""

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage this rank's bytes of a bucket; see ``WeightSender``."""
        raise NotImplementedError

    def load(self, server: ControlCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Let ``server`` load a bucket, or make the preparations for it."""
        raise NotImplementedError

    def finish(self, server: ControlCalls) -> None:
        """All buckets were loaded. Without any since the last time it does nothing."""

    def release_buffers(self) -> None:
        """Release all buffers. Idempotent."""

    def forget(self) -> None:
        """The server is gone, or about to be. Idempotent."""
        self.release_buffers()


class SharedTransport(Transport):
    """Memory that both map: CUDA IPC on a GPU, POSIX shared memory on a CPU.

    Memory: the bucket that is gathered, and two or three flat ones.
    """

    def __init__(
        self, *, device: torch.device, num_ranks: int, encode: Encode, dtype: torch.dtype
    ) -> None:
        """Send weights in ``dtype``, the server's; an EngineError if no memory can be shared."""
        # A server answers from its first rank, whose copies are done: torch waits for them before
        # it closes the opened memory (torch/csrc/StorageSharing.cpp). Other ranks may still copy,
        # but have finished when the server answers the next bucket.
        count = 2 if num_ranks == 1 else 3
        self._buffers = FlatBuffers(count=count, allocate=allocator_of(device), dtype=dtype)
        self._encode = encode

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Copy a bucket to a flat buffer."""
        flat, spans = self._buffers.pack(bucket)
        handle = partial(self._encode, flat, spans)
        return StagedBucket(spans=spans, flat=flat, make_handle=handle)

    def load(self, server: ControlCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Send the handles."""
        server.require_success(
            "/update_weights_from_tensor",
            serialized_named_tensors=list(handles),
            load_format="flattened_bucket",
            flush_cache=False,
        )

    def release_buffers(self) -> None:
        """Release all buffers. Idempotent."""
        self._buffers.free()


class DiskTransport(Transport):
    """Files, loaded at once when all are written: the slowest way, and one that always works."""

    in_session = False

    def __init__(self, *, is_sender: bool, dtype: torch.dtype) -> None:
        """Write nothing yet; ``is_sender`` says whether this rank is the one that writes."""
        self._is_sender, self._dtype = is_sender, dtype
        self._folder: WeightFolder | None = None

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage by reference: a file is written at once."""
        spans = lay_out(bucket, dtype=self._dtype)
        return StagedBucket(spans=spans, tensors=bucket if self._is_sender else ())

    def load(self, server: ControlCalls, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write a file; EngineError if the disk lacks space for it."""
        if self._folder is not None and self._folder.has_any(name for name, _ in staged.tensors):
            self.forget()  # files of an interrupted sync
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="hybridrl-weights-"))
            if_full = ", or rollout.transport=shared"
            self._folder = WeightFolder(folder, dtype=self._dtype, if_full=if_full)
        try:
            self._folder.write(staged, handles)
        except BaseException:
            self.forget()
            raise

    def finish(self, server: ControlCalls) -> None:
        """Let the server load the folder; it is removed afterwards."""
        if self._folder is None:
            return
        try:
            # Named, because the server was started with made-up weights.
            server.load_folder(self._folder.folder, load_format="safetensors")
        finally:
            self.forget()

    def forget(self) -> None:
        """Remove the written files."""
        if self._folder is not None:
            self._folder.remove()
        self._folder = None
