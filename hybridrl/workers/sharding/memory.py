"""Device memory as measured, not as believed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hybridrl.errors import EngineError

_POLL_S = 0.02


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back to the driver, after all kernels are done.

    Precedes every resume: an engine maps memory past torch's allocator and cannot use what that
    caches.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
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


def wait_until_freed(
    resident_bytes: Callable[[], int],
    *,
    expected_free: tuple[torch.device, int] | None,
    timeout_s: float,
) -> None:
    """Return once a release has really happened.

    Args:
        resident_bytes: what the engine itself still counts; must reach 0.
        expected_free: device and the free bytes it must reach; None where only storage can be
            counted.
        timeout_s: seconds to wait.

    Raises:
        EngineError: memory did not come back in time, with both numbers.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        still = resident_bytes()
        short = 0
        if expected_free is not None:
            device, wanted = expected_free
            short = max(0, wanted - (free_bytes(device) or 0))
        if not still and not short:
            return
        if time.monotonic() > deadline:
            raise EngineError(
                f"released memory did not come back within {timeout_s:.3g} s: the engine still "
                f"holds {still / 2**20:.1f} MiB and the device lacks {short / 2**20:.1f} MiB; "
                "if releasing is only slow, raise rollout.stage_timeout_s"
            )
        time.sleep(_POLL_S)
