"""Whether a device has room for what an engine is about to resume: a server dies of asking."""

from __future__ import annotations

import math

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.memory import DeviceMemory

_MIB = 2**20


def require_room(
    part: MemoryTag, needed_bytes: int, *, memory: DeviceMemory, config: RolloutConfig
) -> None:
    """Refuse a resume that finds less free memory than the part gave back when it was released.

    Args:
        part: to be resumed.
        needed_bytes: that it will take at least.
        memory: of the device; a CPU has no figures and is not judged.
        config: the rollout section, for what to type.

    Raises:
        EngineError: bytes needed and free, the key, and what to type.
    """
    free = memory.free_bytes()
    if free is None or free >= needed_bytes:
        return
    lacking = needed_bytes - free
    raise EngineError(
        f"the rollout engine's {part.value} needs {needed_bytes / _MIB:,.1f} MiB and "
        f"{free / _MIB:,.1f} MiB of {memory.device} are free: {lacking / _MIB:,.1f} MiB too few; "
        + _remedy(part, lacking, total=memory.total_bytes() or 0, config=config)
    )


def _remedy(part: MemoryTag, lacking: int, *, total: int, config: RolloutConfig) -> str:
    if config.engine == "hf" and part is MemoryTag.KV_CACHE and config.num_slots > 1:
        return f"set rollout.num_slots={config.num_slots // 2} (it is {config.num_slots})"
    if config.engine == "hf":
        return "train on more ranks, or set rollout.dtype=bfloat16"
    if part is MemoryTag.WEIGHTS:
        ranks = 2 * config.tensor_parallel_size
        return f"set rollout.tensor_parallel_size={ranks}, or train on more ranks"
    fraction = math.floor(100 * (config.memory_fraction - lacking / max(1, total))) / 100
    return f"set rollout.memory_fraction={max(0.01, fraction):g} (it is {config.memory_fraction:g})"
