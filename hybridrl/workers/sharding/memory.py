"""Device memory: its figures and holders; a release must free enough, a resume must have enough.

An engine in another process reports the size of a memory tag from its own figures. Some of that
memory cannot be released: SGLang takes the drop of free memory around the capture of graphs, but
its buffer of logits, page tables and workspaces stay.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import MemoryTag

log = logging.getLogger(__name__)

_MIB = 2**20
_EXPANDABLE_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
"""In allocator settings."""

_DEMANDED = {MemoryTag.WEIGHTS: 0.8, MemoryTag.KV_CACHE: 0.8, MemoryTag.CUDA_GRAPH: 0.0}
"""Fraction of a tag's reported bytes by which free memory must rise."""

_HOPED = 0.97
"""Fraction below which a warning is logged."""

_POLL_S = 0.02
_GRACE_S = 0.5
"""How long a sufficient rise may take to become the full one."""

_KERNELS_BYTES = 256 * _MIB
"""SGLang's figure for weights is the fall of free memory while it loads: kernels that CUDA loads
then are in it, and stay. So nothing is demanded of a small model."""

_REMEDIES = {
    ("hf", True): "train on more ranks, or set rollout.dtype=bfloat16",
    ("hf", False): "lower rollout.num_slots",
    ("sglang", True): "raise rollout.tensor_parallel_size, or train on more ranks",
    ("sglang", False): "lower rollout.memory_fraction",
}
"""By engine, and whether the memory is that of weights."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One line of a table of memory."""

    name: str
    num_bytes: int


class DeviceMemory:
    """One device as its driver and torch's allocator count it; a CPU has no such figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device; None on a CPU, where storage is counted instead."""
        return torch.cuda.mem_get_info(self.device)[0] if self._is_cuda else None

    def allocated_bytes(self) -> int | None:
        """Return the bytes of this process's tensors, of any owner; None on a CPU."""
        return torch.cuda.memory_allocated(self.device) if self._is_cuda else None

    def residue_bytes(self) -> int | None:
        """Return the bytes that nobody frees: contexts, NCCL's, an engine's rest; None on a CPU."""
        if not self._is_cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def figures(self) -> list[Holder]:
        """Return the figures of torch's allocator and the driver; nothing on a CPU."""
        if not self._is_cuda:
            return []
        free, total = torch.cuda.mem_get_info(self.device)
        return [
            Holder("torch allocated, this process", torch.cuda.memory_allocated(self.device)),
            Holder("torch reserved, this process", torch.cuda.memory_reserved(self.device)),
            Holder("device free", free),
            Holder("device total", total),
        ]

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver, after all kernels are done.

        Precedes every resume: an engine maps memory outside torch's allocator and cannot use
        torch's cached blocks.
        """
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
            # Blocks that were shared with another process are cached only after that process has
            # closed them and they were collected.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


@contextmanager
def ordinary_segments() -> Iterator[None]:
    """Switch torch's expandable segments off in the block: it then allocates ordinary memory.

    Memory that grows in place is mapped piece by piece: no other process can open it through CUDA
    IPC, and torch_memory_saver cannot unmap it. Training benefits from it, so it is restored.
    Not yet run on a GPU.
    """
    # The calls behind torch.cuda.memory._set_allocator_settings, which is deprecated.
    settings: str = torch._C._accelerator_getAllocatorSettings()
    if _EXPANDABLE_SEGMENTS.search(settings) is None:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(
        _EXPANDABLE_SEGMENTS.sub("expandable_segments:False", settings)
    )
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def memory_table(title: str, *sections: Sequence[Holder]) -> str:
    """Lay out sections of holders in MiB, the largest of each section first; empty ones are out."""
    shown = [
        sorted((h for h in section if h.num_bytes), key=lambda h: -h.num_bytes)
        for section in sections
    ]
    holders = [holder for section in shown for holder in section]
    if not holders:
        return f"{title}: nobody here holds any"
    width = max(len(holder.name) for holder in holders)
    lines = [f"  {h.name:<{width}} {h.num_bytes / _MIB:>12,.1f} MiB" for h in holders]
    return "\n".join([f"{title}:", *lines])


def demanded_bytes(part: MemoryTag, said_bytes: int) -> int:
    """Return how many of a tag's reported bytes must come back."""
    unowned = _KERNELS_BYTES if part is MemoryTag.WEIGHTS else 0
    return max(0, int(_DEMANDED[part] * said_bytes) - unowned)


def await_release(
    part: MemoryTag,
    said_bytes: int,
    *,
    resident_bytes: Callable[[], int],
    memory: DeviceMemory,
    free_before: int | None,
    timeout_s: float,
) -> int:
    """Return the measured rise of free memory, once it is sufficient and ``resident_bytes`` are 0.

    ``said_bytes`` is the engine's figure; ``free_before`` is None where only storage is counted.
    """
    demanded = demanded_bytes(part, said_bytes)
    begin = enough_at = time.monotonic()
    while True:
        still, seen = resident_bytes(), said_bytes
        if free_before is not None:
            seen = max(0, (memory.free_bytes() or 0) - free_before)
        now = time.monotonic()
        if still or seen < demanded:
            enough_at = now
            if now - begin > timeout_s:
                raise EngineError(
                    f"released memory did not come back within {timeout_s:.3g} s: the engine still "
                    f"holds {still / _MIB:.1f} MiB and the device lacks "
                    f"{max(0, demanded - seen) / _MIB:.1f} MiB; "
                    "if releasing is only slow, raise rollout.stage_timeout_s"
                )
        elif seen >= _HOPED * said_bytes or not demanded or now - enough_at > _GRACE_S:
            break
        time.sleep(_POLL_S)
    write = log.warning if demanded and seen < _HOPED * said_bytes else log.info
    write(
        "released: part=%s said_mib=%.1f seen_mib=%.1f",
        *(part.value, said_bytes / _MIB, seen / _MIB),
    )
    return seen


def require_room(part: MemoryTag, needed_bytes: int, *, memory: DeviceMemory, engine: str) -> None:
    """Refuse a resume with less free memory than the tag gave back: the server would die."""
    free = memory.free_bytes()
    if free is None or free >= needed_bytes:
        return
    raise EngineError(
        f"the rollout engine's {part.value} needs {needed_bytes / _MIB:,.1f} MiB and "
        f"{free / _MIB:,.1f} MiB of {memory.device} are free; "
        + _REMEDIES[engine, part is MemoryTag.WEIGHTS]
    )
