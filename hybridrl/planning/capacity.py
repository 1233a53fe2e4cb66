"""How much memory a rank may take."""

from __future__ import annotations

import os
from pathlib import Path

from hybridrl.config.cluster import ClusterConfig

_GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def capacity_bytes(cluster: ClusterConfig) -> int | None:
    """Return the memory of one rank's device.

    ``cluster.device_memory_gib`` if it is set. Else, on a CPU, an equal share of this machine's
    memory for each of its ranks; on CUDA None: nobody said how large the GPU is.
    """
    if cluster.device_memory_gib is not None:
        return int(cluster.device_memory_gib * _GIB)
    if cluster.device == "cuda":
        return None
    return _machine_bytes() // cluster.num_ranks_per_node


def _machine_bytes() -> int:
    """Return the memory of this machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
