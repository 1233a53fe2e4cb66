"""torch's expandable segments, off while a rollout engine has the device.

Memory that grows in place is mapped piece by piece: no other process can open it through CUDA IPC,
and torch_memory_saver cannot unmap it. Training is better off with it, so it comes back.
Unproved on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrl.workers.rollout.sglang.memory_saver import EXPANDABLE_SEGMENTS


@contextmanager
def ordinary_segments() -> Iterator[None]:
    """Within this, what torch allocates anew lies in ordinary memory; other settings stay."""
    # The calls behind torch.cuda.memory._set_allocator_settings, which is deprecated.
    settings: str = torch._C._accelerator_getAllocatorSettings()
    if EXPANDABLE_SEGMENTS.search(settings) is None:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(
        EXPANDABLE_SEGMENTS.sub("expandable_segments:False", settings)
    )
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
