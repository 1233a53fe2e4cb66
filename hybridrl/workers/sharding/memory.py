"""Device memory: the figures of the driver and of torch's allocator, and its holders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_MIB = 2**20
_EXPANDABLE_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
"""In allocator settings."""


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back to the driver, after all kernels are done.

    Precedes every resume: an engine maps memory outside torch's allocator and cannot use torch's
    cached blocks. Blocks that were shared with another process are cached only after that process
    has closed them and they were collected.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of the device; None on a CPU, where storage is counted instead."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def residue_bytes(device: torch.device) -> int | None:
    """Return the device memory that is neither free nor torch's in this process; None on a CPU.

    It cannot be freed while engines sleep: contexts and NCCL's buffers of all processes on the
    device, and an engine's memory besides weights and cache.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class DeviceMemory:
    """One device as its driver and torch's allocator count it; a CPU has no such figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device; None on a CPU."""
        return free_bytes(self.device)

    def total_bytes(self) -> int | None:
        """Return the bytes of the device; None on a CPU."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.mem_get_info(self.device)[1] if is_cuda else None

    def allocated_bytes(self) -> int | None:
        """Return the bytes of this process's tensors, of any owner; None on a CPU."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) if is_cuda else None

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver; see ``empty_cache``."""
        empty_cache(self.device)


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


@dataclass(frozen=True, slots=True)
class Holder:
    """One line of the table."""

    name: str
    num_bytes: int


def device_figures(device: torch.device) -> tuple[Holder, ...]:
    """Return the figures of torch's allocator and the driver; nothing on a CPU."""
    if device.type != "cuda":
        return ()
    free, total = torch.cuda.mem_get_info(device)
    return (
        Holder("torch allocated, this process", torch.cuda.memory_allocated(device)),
        Holder("torch reserved, this process", torch.cuda.memory_reserved(device)),
        Holder("device free", free),
        Holder("device total", total),
    )


def memory_table(title: str, *sections: Sequence[Holder]) -> str:
    """Lay out sections of holders in MiB, the largest of each section first.

    Args:
        sections: lines that belong together; empty holders and empty sections are left out.
    """
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
