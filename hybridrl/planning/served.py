"""Memory of the devices of rollout servers that are not the trainer's, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config.architecture import architecture_of, read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup
from hybridrl.planning.plan import capacity_bytes
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The most that a device of one group holds."""

    group: PlacedGroup
    weights: int
    kv_cache: int

    other: int
    """Graphs, workspaces and the tensors of a pass."""

    share: int
    smallest_share: int
    """Of the device, for weights and cache: what it is, and the least that a start needs."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.other


def plan_servers(config: ExperimentConfig) -> Iterator[GroupMemory]:
    """Yield the memory of each group that has engines.

    Args:
        config: has passed its checks.

    Raises:
        ModelError: a config.json cannot be read, or is of an unknown family.
    """
    if not config.has_servers:
        return
    longest = Workload.longest(config)
    capacity = capacity_bytes(config.cluster) if config.cluster.device == "cuda" else None
    for group in config.serving.placed_groups:
        path = config.serving.models[group.model].path
        if not group.config.num_engines or config.is_fused(group):
            continue
        size = group.config.devices_per_engine
        memory = RolloutMemory(
            replace(config, rollout=replace(config.rollout, tensor_parallel_size=size)),
            architecture_of(config.model) if path is None else read_architecture(Path(path)),
            longest.sampling(config),
            longest.num_row_tokens,
            capacity,
        )
        yield GroupMemory(
            group,
            weights=memory.weights,
            kv_cache=memory.kv_cache,
            other=memory.server_graphs + memory.server_resident + memory.computing,
            share=memory.share,
            smallest_share=memory.smallest_share,
        )
