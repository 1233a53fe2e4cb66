"""How buckets of weights reach a rank's own server: one class per value of ``rollout.transport``.

The only module that imports sglang, for the handles with which a server opens memory of this
process. Servers on devices of their own: ``broadcast.py`` and ``workers/sharding/publishing.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from hybridrl.config.rollout import RolloutConfig
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import (
    Bucket,
    FlatBuffers,
    StagedBucket,
    TensorSpan,
    allocator_of,
    lay_out,
)
from hybridrl.workers.rollout.sglang.client import ControlCalls
from hybridrl.workers.rollout.weight_folder import WeightFolder

try:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
except ImportError as err:
    raise ImportError(
        "rollout=sglang needs SGLang: pip install 'hybridrl[sglang]' (on a CPU: make sglang-cpu), "
        "or use rollout=hf"
    ) from err


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

    def __init__(self, *, device: torch.device, num_ranks: int, dtype: torch.dtype) -> None:
        """Send weights in ``dtype``, the server's; an EngineError if no memory can be shared."""
        # A server answers from its first rank, whose copies are done: torch waits for them before
        # it closes the opened memory (torch/csrc/StorageSharing.cpp). Other ranks may still copy,
        # but have finished when the server answers the next bucket.
        count = 2 if num_ranks == 1 else 3
        self._buffers = FlatBuffers(count=count, allocate=allocator_of(device), dtype=dtype)

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Copy a bucket to a flat buffer."""
        flat, spans = self._buffers.pack(bucket)
        handle = partial(encode, flat, spans)
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


def build_transport(
    rollout: RolloutConfig, *, device: torch.device, is_sender: bool, from_disk: bool
) -> Transport:
    """Make the transport of one rank of an engine; others than the sender only stage."""
    # Handles of host memory are names then, which a server's ranks can open although they are not
    # children of this process: buckets on a CPU, adapters everywhere.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        _name_gpus_by_serial_number()
    num_ranks, dtype = rollout.tensor_parallel_size, DTYPES[rollout.dtype]
    if from_disk:
        return DiskTransport(is_sender=is_sender, dtype=dtype)
    return SharedTransport(device=device, num_ranks=num_ranks, dtype=dtype)


def _name_gpus_by_serial_number() -> None:
    """Let handles of GPU memory do so: a server numbers only its visible GPUs.

    SGLang's patch takes every tensor for one on a GPU, and raises IndexError for an adapter, which
    is sent from the host.
    """
    functions: Any = reductions
    if hasattr(functions, "_reduce_tensor_original"):
        return
    of_host = functions.reduce_tensor
    monkey_patch_torch_reductions()
    of_gpus = functions.reduce_tensor
    functions.reduce_tensor = lambda tensor: (of_gpus if tensor.is_cuda else of_host)(tensor)
    functions.init_reductions()


def encode(flat: Tensor, spans: Sequence[TensorSpan]) -> str:
    """Make the handle with which one rank of a server, and only one, opens a flat buffer, once."""
    metadata = [
        FlattenedTensorMetadata(
            name=span.name,
            shape=torch.Size(span.shape),
            dtype=span.dtype,
            start_idx=span.begin,
            end_idx=span.end,
            numel=span.end - span.begin,
        )
        for span in spans
    ]
    return serialized({"flattened_tensor": flat, "metadata": metadata})


def serialized(payload: object) -> str:
    """Write tensors as handles of their memory."""
    text: str = MultiprocessingSerializer.serialize(payload, output_str=True)
    return text
