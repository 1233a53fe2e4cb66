"""Starts the processes of a model's engines, as Ray actors on the devices of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.serving import ServedModelConfig
from hybridrl.serving.engine_process import (
    AttachedEngine,
    EngineProcess,
    FollowedEngine,
    FollowerProcess,
    RayEngine,
)
from hybridrl.serving.placement import EnginePlace, ReservedNode
from hybridrl.serving.plan import EnginePlan, GroupPlan, ServerPlan
from hybridrl.workers.engine_settings import (
    attached_config,
    engine_config,
    frozen_config,
    group_arguments,
)
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, LaunchPlace

_OTHER_CALLS = 100
"""Calls to an engine beside its requests: stages, probes, and requests that were given up. Ray runs
1,000 at a time by default, and an engine whose probe waits behind them would count as hung."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """API keys of rollout servers, for the manager. Never shown, logged or written."""

    own: str = field(default="", repr=False)
    """Of the router, of its servers, and of the engines of the ranks; made for the run."""

    by_model: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of servers that run elsewhere, by the name of their model."""

    @classmethod
    def read(cls, config: ExperimentConfig, *, own: str) -> ServerKeys:
        """Read those of servers elsewhere from the environment of this process."""
        external = config.serving.external
        by_model = {name: env.get(model.key_variable or "") for name, model in external.items()}
        return cls(own, by_model)

    def of(self, model: str) -> str:
        """Return the key of a model's servers elsewhere; empty if they require none."""
        return self.by_model.get(model, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerDevices:
    """Devices that the driver reserved for the servers, and the way to start processes there."""

    placements: Sequence[Mapping[str, Any]]
    """Options of Ray for a process on each device of the servers."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the processes."""

    places: Mapping[int, EnginePlace] = field(default_factory=dict)
    """Of ``find_places``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLaunch:
    """A ``Launch`` for the engines of one model."""

    config: ExperimentConfig

    plan: ServerPlan

    policy_folder: Path
    """Whose configuration and tokenizer the engines of the policy read."""

    devices: ServerDevices

    nodes: Mapping[int, ReservedNode] = field(default_factory=dict)
    """Of ``find_reserved_nodes``."""

    keys: ServerKeys = field(default_factory=ServerKeys)

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

    @property
    def _served(self) -> ServedModelConfig:
        return self.config.serving.models[self.plan.model]

    @property
    def _is_policy(self) -> bool:
        return self.plan.model == self.config.serving.policy

    def _device(self, engine: EnginePlan, rank: int) -> int:
        part = engine.slices[rank]
        return part.node * self.config.serving.num_devices_per_node + part.first_device

    def _attach(self, engine: EnginePlan) -> Any:  # noqa: ANN401 - Ray's
        config = attached_config(self.config)
        model = self.plan.model
        elsewhere = Elsewhere(
            url=engine.url,
            key=self.keys.of(model),
            section=f"serving.models.{model}",
            weights=config.serving.weights,
        )
        return (
            ray.remote(EngineProcess)
            .options(
                num_cpus=0,
                runtime_env=self._environment,
                max_concurrency=config.rollout.num_slots + _OTHER_CALLS,
            )
            .remote(
                config,
                self.policy_folder,
                LaunchPlace(gpus=("",), elsewhere=elsewhere),
                process=self._process(engine),
            )
        )

    @property
    def _environment(self) -> dict[str, dict[str, str]]:
        variables = self.devices.variables
        return {"env_vars": dict(variables)} if variables else {}

    def _start(self, group: GroupPlan, engine: EnginePlan, rank: int) -> Any:  # noqa: ANN401 - Ray's
        actor_class = ray.remote(FollowerProcess if rank else EngineProcess)
        config = engine_config(
            self.config if self._is_policy else frozen_config(self.config, self.plan.model),
            self._arguments(group, engine, rank),
            num_devices=engine.num_devices,
            number=engine.first_device,
        )
        options = {
            **self.devices.placements[self._device(engine, rank)],
            "runtime_env": self._environment,
        }
        if not rank:
            options["max_concurrency"] = config.rollout.num_slots + _OTHER_CALLS
        folder = self.policy_folder if self._is_policy else Path(str(self._served.path))
        serving = self.config.serving  # callers on other nodes: the manager, the rank that sends
        is_reached = self.config.asks_servers or serving.weights == "broadcast"
        key = self.keys.own if self._is_policy and is_reached else ""
        return actor_class.options(**options).remote(
            config,
            folder,
            self._place(group, engine, rank),
            *([] if rank else [key, self._process(engine)]),
        )

    def _process(self, engine: EnginePlan) -> str:
        return f"{self.plan.model}-engine-{self.plan.engines.index(engine)}"

    def _arguments(
        self, group: GroupPlan, engine: EnginePlan, rank: int
    ) -> dict[str, ArgumentValue]:
        """Return SGLang's arguments of the group, and those that follow from the engine's place."""
        config = self._served.groups[group.name]
        place = self.devices.places.get(engine.first_device)
        if place is None:
            return group_arguments(config)
        args = group_arguments(config, bootstrap_port=place.address.bootstrap_port)
        return args | place.node_arguments(rank)

    def _place(self, group: GroupPlan, engine: EnginePlan, rank: int) -> LaunchPlace | None:
        places = self.devices.places
        place = places.get(engine.first_device)
        if place is None:
            return None
        is_decode = group.worker_type == "decode"
        prefills = self.plan.engines_of_type("prefill") if is_decode else ()
        return LaunchPlace(
            gpus=place.gpus_of_nodes[rank],
            address=None if rank or group.worker_type == "regular" else place.address,
            prefills=tuple(places[one.first_device].address for one in prefills),
        )
