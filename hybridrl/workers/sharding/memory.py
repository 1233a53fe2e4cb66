"""Device memory as measured, not as believed."""

from __future__ import annotations

import torch


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back to the driver, after all kernels are done.

    Precedes every resume: an engine maps memory past torch's allocator and cannot use what that
    caches. Blocks that were shared with another process are cached only when they were collected,
    after that process has closed them.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of the device; None on a CPU, where storage is counted instead."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def residue_bytes(device: torch.device) -> int | None:
    """Return what of the device is neither free nor torch's in this process; None on a CPU.

    While engines sleep nobody can give it back: contexts and NCCL's buffers of all processes on
    the device, and what an engine keeps beside its weights and cache.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class DeviceMemory:
    """One device as its driver and torch's allocator see it; of a CPU they say nothing."""

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
        """Return what tensors of this process take, whoever holds them; None on a CPU."""
        is_cuda = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) if is_cuda else None

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver; see ``empty_cache``."""
        empty_cache(self.device)
