"""Buckets of the weight stream: tensors that travel together, by reference or as flat bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl import env
from hybridrl.errors import EngineError

Bucket = Sequence[tuple[str, Tensor]]
"""Full tensors by HF name that travel together."""

Allocate = Callable[[int], Tensor]
"""Makes a uint8 [n] tensor of n bytes."""

_PRELOAD = "LD_PRELOAD"
_SAVER = "torch_memory_saver"


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Position of a tensor in a flat buffer."""

    name: str  # HF name
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # offset in bytes, a multiple of the item size
    end: int  # offset in bytes of the next tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedBucket:
    """A bucket that one rank has staged for the engine that it shares with its neighbours."""

    spans: tuple[TensorSpan, ...]
    """Its tensors; the same on all ranks, whether they contribute bytes or not."""

    tensors: Bucket = ()
    """The tensors themselves, where they are loaded in this process; else empty."""

    flat: Tensor | None = None
    """uint8 [n], a copy of the bytes; None on a rank whose bytes are not needed."""

    make_handle: Callable[[], str] = str
    """Makes the text that opens this rank's bytes in the engine's server; empty if it needs none.
    Called once, if the bucket is sent: torch keeps GPU memory until its handles were opened."""

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer that holds ``flat``."""
        return 0 if self.flat is None else self.flat.untyped_storage().nbytes()


def as_sent(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor, where it is, as engines get it: floats in ``dtype``, if given."""
    tensor = tensor.detach()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def stage_by_reference(bucket: Bucket) -> StagedBucket:
    """Stage without a copy: the engine reads the tensors themselves."""
    return StagedBucket(spans=lay_out(bucket), tensors=bucket)


def lay_out(bucket: Bucket, *, dtype: torch.dtype | None = None) -> tuple[TensorSpan, ...]:
    """Lay tensors end to end, widest numbers first: so each begins at a multiple of its item."""

    def type_of(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    spans: list[TensorSpan] = []
    end = 0
    for name, tensor in sorted(bucket, key=lambda item: -type_of(item[1]).itemsize):
        kind = type_of(tensor)
        begin, end = end, end + tensor.numel() * kind.itemsize
        spans.append(TensorSpan(name, kind, tuple(tensor.shape), begin, end))
    return tuple(spans)


def tensors_in(flat: Tensor, spans: Sequence[TensorSpan]) -> dict[str, Tensor]:
    """Return views of the tensors in a flat buffer, by name."""
    return {
        span.name: flat[span.begin : span.end].view(span.dtype).view(span.shape) for span in spans
    }


class FlatBuffers:
    """A ring of byte buffers, each allocated when first used and again when it is too small."""

    def __init__(self, *, count: int, allocate: Allocate, dtype: torch.dtype | None = None) -> None:
        """Keep ``count`` buckets readable at a time; floats become ``dtype``, if given."""
        self._dtype = dtype
        self._allocate = allocate
        self._ring: list[Tensor | None] = [None] * count
        self._next = 0

    def pack(self, bucket: Bucket) -> tuple[Tensor, tuple[TensorSpan, ...]]:
        """Copy a bucket into the next buffer; return its bytes, and the position of each tensor.

        The copies are done, on a GPU too, and readable until ``count`` - 1 further ones are staged.
        """
        spans = lay_out(bucket, dtype=self._dtype)
        num_bytes = spans[-1].end if spans else 0
        flat = self._take(num_bytes)[:num_bytes]
        targets = tensors_in(flat, spans)
        for name, tensor in bucket:
            # Nothing waits below for a copy to the host.
            targets[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda and flat.is_cuda)
        if flat.is_cuda:
            # Another process is about to read, and does not know this process's streams.
            torch.cuda.current_stream(flat.device).synchronize()
        return flat, spans

    def free(self) -> None:
        """Release the memory. Idempotent."""
        self._ring = [None] * len(self._ring)

    def _take(self, num_bytes: int) -> Tensor:
        index, self._next = self._next, (self._next + 1) % len(self._ring)
        buffer = self._ring[index]
        if buffer is None or len(buffer) < num_bytes:
            self._ring[index] = None  # before its successor is allocated
            largest = max((len(other) for other in self._ring if other is not None), default=0)
            buffer = self._ring[index] = self._allocate(max(num_bytes, largest))
        return buffer


def allocate_shared(num_bytes: int) -> Tensor:
    """Return host memory that other processes can map by its name; EngineError without enough."""
    try:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        buffer.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise EngineError(
            f"no {num_bytes / 2**20:.0f} MiB of shared memory for a bucket of weights: {error}; "
            "give /dev/shm more room (docker run --shm-size=8g), lower rollout.bucket_mib, or set "
            "rollout.transport=disk"
        ) from error
    return buffer


def allocator_of(device: torch.device) -> Allocate:
    """Return a function that makes memory on ``device`` which another process can open.

    On a GPU cudaMalloc returns such memory. Pages that torch_memory_saver maps cannot be exported.
    Neither can segments that grow in place, but weights are streamed while these are off
    (``ordinary_segments`` in sharding/memory.py). torch then returns none of them, not even cached
    ones (CUDACachingAllocator, get_free_block), so training may use them.
    """
    if device.type == "cpu":
        return allocate_shared
    if _SAVER in env.get(_PRELOAD):
        raise EngineError(
            f"{_PRELOAD}={env.get(_PRELOAD)!r}: CUDA IPC cannot export the memory of this process; "
            f"unset {_PRELOAD} for the trainer, or set rollout.transport=disk"
        )
    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device)
