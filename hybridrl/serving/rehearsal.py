"""The configurations of all engines of a run, for SGLang's own check of its arguments."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import PlacedGroup
from hybridrl.config.topology import Colocated
from hybridrl.serving.plan import plan_servers
from hybridrl.workers.engine_settings import engine_config, group_arguments, led_config

_PORT = 20_000


def rehearsed_configs(
    config: ExperimentConfig,
) -> Iterator[tuple[PlacedGroup, ExperimentConfig]]:
    """Yield each group with engines, and the configuration of one with ports that nobody opens."""
    topology = config.topology
    led = topology.engines if isinstance(topology, Colocated) else ()
    first_of = {each.group.key: each for each in reversed(led) if each.group is not None}
    plans = {
        (plan.model, group.name): group for plan in plan_servers(config) for group in plan.groups
    }
    for placed in config.serving.placed_groups:
        if not placed.config.num_engines:
            continue
        port = _PORT if placed.config.worker_type == "prefill" else None
        if placed.key in first_of:
            yield placed, led_config(config, first_of[placed.key], bootstrap_port=port)
            continue
        args = group_arguments(placed.config, bootstrap_port=port)
        num_nodes = plans[placed.model, placed.name].num_nodes_per_engine
        if num_nodes > 1:
            args |= {
                "nnodes": num_nodes,
                "node_rank": 0,
                "dist_init_addr": f"127.0.0.1:{_PORT}",
                "nccl_port": _PORT,
            }
        yield placed, engine_config(config, args, num_devices=placed.config.devices_per_engine)
