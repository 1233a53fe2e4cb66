"""Starts the processes of a model's engines, as Ray actors on the devices of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.serving import HALVES
from hybridrl.serving.engine_process import AttachedEngine, EngineProcess, RayEngine
from hybridrl.serving.followers import FollowedEngine, FollowerProcess
from hybridrl.serving.placement import EnginePlace
from hybridrl.serving.plan import EnginePlan, GroupPlan
from hybridrl.serving.reserved_nodes import ReservedNode
from hybridrl.serving.settings import attached_config, engine_config, frozen_config
from hybridrl.workers.rollout.sglang.arguments import ServerElsewhere, ServerPlace

_OTHER_CALLS = 100
"""Calls to an engine beside its requests: stages, probes, and requests that were given up. Ray runs
1,000 at a time by default, and an engine whose probe waits behind them would count as hung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLaunch:
    """A ``Launch`` for the engines of one model."""

    config: ExperimentConfig
    """Of the run."""

    model: str
    """Name of the model."""

    model_folder: Path
    """Whose configuration and tokenizer the engines read."""

    placements: Sequence[Mapping[str, Any]]
    """Options of Ray for a process on each device of the servers."""

    variables: Mapping[str, str]
    """Environment of the processes."""

    places: Mapping[int, EnginePlace]
    """Of ``find_places``."""

    prefills: Sequence[EnginePlan] = ()
    """Prefill engines of the model."""

    nodes: Mapping[int, ReservedNode] = field(default_factory=dict)
    """Of ``find_reserved_nodes``."""

    key: str = field(default="", repr=False)
    """Of the router, or of servers that others run; empty: there is none."""

    def __call__(self, group: GroupPlan, engine: EnginePlan) -> RayEngine:
        """Start the processes of an engine, one on each of its nodes, without waiting.

        Each takes a share of the first device of its node; the run's pool holds all devices. That
        of a server that others run takes none.
        """
        if engine.url:
            return AttachedEngine(self._attach(engine))
        actors = [self._start(group, engine, rank) for rank in range(len(engine.slices))]
        nodes = [self.nodes.get(self._device(engine, rank)) for rank in range(len(actors))]
        kind = FollowedEngine if len(actors) > 1 else RayEngine
        return kind(*actors, nodes=tuple(filter(None, nodes)))

    def _device(self, engine: EnginePlan, rank: int) -> int:
        part = engine.slices[rank]
        return part.node * self.config.serving.num_devices_per_node + part.first_device

    def _attach(self, engine: EnginePlan) -> Any:  # noqa: ANN401 - Ray's
        config = attached_config(self.config)
        section = f"serving.models.{self.model}"
        return (
            ray.remote(EngineProcess)
            .options(
                num_cpus=0,
                runtime_env=self._environment,
                max_concurrency=config.rollout.num_slots + _OTHER_CALLS,
            )
            .remote(
                config,
                self.model_folder,
                ServerPlace(
                    gpus=("",),
                    elsewhere=ServerElsewhere(url=engine.url, key=self.key, section=section),
                ),
            )
        )

    @property
    def _environment(self) -> dict[str, dict[str, str]]:
        return {"env_vars": dict(self.variables)} if self.variables else {}

    def _start(self, group: GroupPlan, engine: EnginePlan, rank: int) -> Any:  # noqa: ANN401 - Ray's
        actor_class = ray.remote(FollowerProcess if rank else EngineProcess)
        served = self.config.serving.models[self.model]
        config = engine_config(
            self.config if served.path is None else frozen_config(self.config, served),
            self._arguments(group, engine, rank),
            num_devices=engine.num_devices,
        )
        options = {**self.placements[self._device(engine, rank)], "runtime_env": self._environment}
        if not rank:
            options["max_concurrency"] = config.rollout.num_slots + _OTHER_CALLS
        return actor_class.options(**options).remote(
            config,
            self.model_folder,
            self._place(group, engine, rank),
            *([] if rank else [self.key]),
        )

    def _arguments(
        self, group: GroupPlan, engine: EnginePlan, rank: int
    ) -> dict[str, ArgumentValue]:
        """Return SGLang's arguments of the group, and those that follow from the engine's place."""
        args: dict[str, ArgumentValue] = {}
        if group.worker_type in HALVES:
            args["disaggregation_mode"] = group.worker_type
        args |= self.config.serving.models[self.model].groups[group.name].engine_args
        place = self.places.get(engine.first_device)
        if place is None:
            return args
        if (port := place.address.bootstrap_port) is not None:
            args["disaggregation_bootstrap_port"] = port
        return args | place.node_arguments(rank)

    def _place(self, group: GroupPlan, engine: EnginePlan, rank: int) -> ServerPlace | None:
        place = self.places.get(engine.first_device)
        if place is None:
            return None
        prefills = self.prefills if group.worker_type == "decode" else ()
        return ServerPlace(
            gpus=place.gpus_of_nodes[rank],
            address=None if rank or group.worker_type == "regular" else place.address,
            prefills=tuple(self.places[one.first_device].address for one in prefills),
        )
