"""Measures what ``lora.base=auto`` depends on, and chooses for all ranks alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.model import LoraConfig
from hybridrl.planning.frozen_base import BasePlan, RankFacts, choose_base
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.memory import DeviceMemory

log = logging.getLogger(__name__)

_PROBE_BYTES = 256 * 2**20
_MEMINFO = Path("/proc/meminfo")


def resolve_lora_base(
    lora: LoraConfig,
    *,
    plan: BasePlan | None,
    device: torch.device,
    control: ControlGroup,
    num_ranks_per_node: int,
) -> LoraConfig:
    """Replace ``base=auto`` by the chosen value, and log the reason. A collective call.

    Call it before any engine is built: free memory is that of an empty device.
    """
    if lora.base != "auto":
        return lora
    facts = []
    if plan is not None:
        measured = _measure(device, num_ranks_per_node)
        DeviceMemory(device).empty_cache()
        facts = control.gather("measure lora.base", measured)
    base, why = choose_base(plan, facts)
    if lora.sends_adapters and control.rank == 0:
        # Users see only warnings of a worker's log, and copies cost seconds of every step.
        level = logging.INFO if base == "resident" else logging.WARNING
        log.log(level, "lora.base=auto: %s, because %s", base, why)
    return replace(lora, base=base)


def _measure(device: torch.device, num_ranks_per_node: int) -> RankFacts:
    """Copy a probe both ways. Not yet run on a GPU."""
    on_device = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    away = _bytes_per_s(lambda: on_host.copy_(on_device), device)
    back = _bytes_per_s(lambda: on_device.copy_(on_host), device)
    resend = _bytes_per_s(_resender(on_device), device)
    return RankFacts(
        free_device_bytes=DeviceMemory(device).free_bytes() or 0,
        free_host_bytes=_free_host_bytes() // num_ranks_per_node,
        host_bytes_per_s=2 / (1 / away + 1 / back),
        resend_bytes_per_s=resend,
    )


def _resender(probe: torch.Tensor) -> Callable[[], object]:
    """Cost of a byte that is sent again: gathered from the ranks, copied once."""
    target = torch.empty_like(probe)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return lambda: target.copy_(probe)
    shard = probe[: _PROBE_BYTES // world_size]
    gathered = target[: len(shard) * world_size]
    return lambda: (dist.all_gather_into_tensor(gathered, shard), probe.copy_(target))


def _bytes_per_s(copy: Callable[[], object], device: torch.device) -> float:
    memory = DeviceMemory(device)
    copy()  # the first call pays for one-time set-up
    memory.empty_cache()
    begin = time.perf_counter()
    copy()
    memory.empty_cache()  # waits for the kernels
    return _PROBE_BYTES / max(1e-9, time.perf_counter() - begin)


def _free_host_bytes() -> int:
    """Return the memory that a new process can take; 0 if the kernel does not report it."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else 0
