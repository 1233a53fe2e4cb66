"""The sharding manager of a rank, put together as ``workers/build.py`` does."""

from __future__ import annotations

import torch

from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.topology import Fused, LedDevices
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.sharding.publishing import Publisher

CPU = torch.device("cpu")


def sharding_manager(
    engine: RolloutEngine | None,
    *,
    config: RolloutConfig,
    control: ControlGroup | None = None,
    call_timeout_s: float = 60.0,
    engines: tuple[LedDevices, ...] | None = None,
    servers: ManagerClient | None = None,
    lora: LoraConfig | None = None,
) -> ShardingManager:
    """Return the manager of this rank, which owns ``engine``; ``servers`` get the weights, too.

    ``engines`` are those of all ranks; None: each ``rollout.tensor_parallel_size`` ranks share one.
    """
    control = control or ControlGroup(timeout_s=20.0)
    if engines is None:
        engines = Fused(control.world_size, config.tensor_parallel_size).engines
    others = None
    if servers is not None:
        others = Publisher(servers, config=config, device=CPU, control=control)
    return ShardingManager(
        engines=FusedEngines(
            None if engine is None else ManagedEngine(engine, config=config, device=CPU),
            engines=engines,
            config=config,
            device=CPU,
            control=control,
            others=others,
        ),
        config=config,
        meter=PeakMeter(CPU),
        control=control,
        call_timeout_s=call_timeout_s,
        lora=lora,
    )


def rank_of_servers(servers: ManagerClient, config: RolloutConfig) -> ShardingManager:
    """Return the manager of a rank whose engines are real servers with devices of their own."""
    control = ControlGroup(timeout_s=30.0)
    return sharding_manager(
        None, engines=(), servers=servers, config=config, control=control, call_timeout_s=300.0
    )
