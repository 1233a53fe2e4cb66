"""A memory plan: phases of a run, each with the items in memory at its fullest moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hybridrl.config.cluster import ClusterConfig

WITH_ENGINE = ("build", "sync", "generate")
"""Phases in which the rollout engine's weights are on the device, wherever it sleeps."""

_GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class MemoryKind(Enum):
    """Kind of memory. On a CPU both kinds are the same memory."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """An item that takes memory on one rank."""

    name: str
    num_bytes: int
    kind: MemoryKind = MemoryKind.DEVICE


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run at its fullest moment."""

    name: str
    """Its name in the metric ``memory/<name>_peak_bytes/max``."""

    items: tuple[MemoryItem, ...]

    def bytes_on(self, kind: MemoryKind) -> int:
        """Return the bytes of one kind of memory."""
        return sum(item.num_bytes for item in self.items if item.kind is kind)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the fullest rank, phase by phase, in the order of a run."""

    device: str
    """cpu or cuda."""

    phases: tuple[Phase, ...]

    stage: int | None = None
    """Pipeline stage of that rank, from 0; None without a pipeline."""

    def peak_bytes(self, phase: Phase) -> int:
        """Return the bytes on the device; on a CPU those of the host are in the same memory."""
        host = phase.bytes_on(MemoryKind.HOST) if self.device == "cpu" else 0
        return phase.bytes_on(MemoryKind.DEVICE) + host

    @property
    def fullest(self) -> Phase:
        """The phase that decides whether the run fits."""
        return max(self.phases, key=self.peak_bytes)


def capacity_bytes(cluster: ClusterConfig) -> int | None:
    """Return the memory of one rank's device.

    ``cluster.device_memory_gib`` if it is set. Otherwise, on a CPU, each rank's equal share of
    this machine's or container's memory, whichever is less; on CUDA None: the size is unknown.
    """
    if cluster.device_memory_gib is not None:
        return int(cluster.device_memory_gib * _GIB)
    if cluster.device == "cuda":
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return (min(total, int(limit)) if limit.isdigit() else total) // cluster.num_ranks_per_node
