"""Memory of the devices of rollout servers, group by group; those of ranks have their own plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup
from hybridrl.models.architecture import Architecture, architecture_of, read_architecture
from hybridrl.planning.plan import capacity_bytes
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.planning.workload import Workload


def plan_servers(config: ExperimentConfig) -> Iterator[tuple[PlacedGroup, RolloutMemory]]:
    """Yield each group that has engines, and the memory of a device of one.

    Args:
        config: has passed its checks.

    Raises:
        ModelError: a config.json cannot be read, or is of an unknown family.
    """
    if not config.has_servers:
        return
    for group in config.serving.placed_groups:
        path, size = config.serving.models[group.model].path, group.config.devices_per_engine
        is_of_rank = path is None and size == config.rollout.tensor_parallel_size
        if not group.config.num_engines or (is_of_rank and config.is_on_trainer(group)):
            continue
        model = architecture_of(config.model) if path is None else read_architecture(Path(path))
        rollout = replace(config.rollout, tensor_parallel_size=size)
        yield group, engine_memory(replace(config, rollout=rollout), model)


def engine_memory(config: ExperimentConfig, model: Architecture) -> RolloutMemory:
    """Return the memory of an engine for rows of full length."""
    longest = Workload.longest(config)
    capacity = capacity_bytes(config.cluster) if config.cluster.device == "cuda" else None
    tokens = longest.num_row_tokens
    return RolloutMemory(config, model, longest, tokens, capacity)
