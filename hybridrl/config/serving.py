"""The ``serving`` section: rollout engines in groups behind a server, most on their own devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hybridrl.config.limits import Arguments, Count, Name, Ranks, RanksOrZero, Rows, Seconds, Tokens

WeightRoute = Literal["files", "broadcast"]
OnUpdate = Literal["interrupt", "finish", "abort"]
WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]

HALVES = ("prefill", "decode")
"""Types of engines that share the work of each request."""

ASKED_BY_OTHERS = (*HALVES, "encoder")
"""Types of engines whose addresses others of their model have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerGroupConfig:
    """Equal engines on adjacent devices: ``serving.models.MODEL.groups.NAME``."""

    num_devices: Ranks
    """Devices of all engines of the group together."""

    devices_per_engine: Ranks = 1
    """Devices that share one engine."""

    worker_type: WorkerType = "regular"
    """Work of the engines. ``prefill`` and ``decode`` share a request; an ``encoder`` has a
    vision tower alone, and makes embeddings of images for the others; ``placeholder`` keeps its
    devices free and has no engine."""

    engine_args: Arguments = field(default_factory=dict)
    """Arguments of SGLang for this group alone; they replace those of ``rollout.engine_args``."""

    @property
    def num_engines(self) -> int:
        """Engines of the group; a placeholder has none."""
        if self.worker_type == "placeholder":
            return 0
        return self.num_devices // self.devices_per_engine


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelConfig:
    """One model behind one server: ``serving.models.NAME``."""

    groups: Mapping[Name, ServerGroupConfig] = field(default_factory=dict)
    """Groups by name, in the order of their devices. Empty for a model that ``urls`` serve."""

    path: str | None = None
    """Hugging Face folder of a frozen model, which never gets weights of the trainer. Null: the
    policy."""

    max_context_tokens: Tokens | None = None
    """Longest context plus answer of a frozen model. Null: what the longest question of its
    judges and the answer need, as far as the model goes."""

    urls: tuple[str, ...] = ()
    """Servers of SGLang that run already and answer for this model, as http://HOST:PORT. They are
    compared at the start, and outlive the run. Those of a frozen model have its weights, so
    ``path`` needs none; those of the policy get its weights in each step."""

    key_variable: str | None = None
    """Environment variable of the driver with the API key of ``urls``. Null: they require none."""


FaultKind = Literal["kill", "stop", "cut", "error", "tokens", "logprobs", "version", "kill_manager"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """A fault that is made on purpose, to try the recovery: ``serving.faults.NAME``."""

    kind: FaultKind
    """``kill`` or ``stop`` the engine that gets a request, ``cut`` its network, or let it answer
    with an error, with impossible tokens or log-probs, or as another version; ``kill_manager``
    kills the manager."""

    every_num_phases: Count = 1
    """Phases in which engines sample, between two such faults; 1: in each."""

    within_requests: Rows = 1
    """The fault comes at one of the first so many requests of its phase, drawn by ``seed``."""


class PlacedGroup(NamedTuple):
    """A group, and its first device among those of the servers."""

    model: str
    """Name of its model."""
    name: str
    """Of the group."""
    config: ServerGroupConfig
    """The section."""
    first_device: int
    """Index among the devices of all servers."""

    @property
    def key(self) -> str:
        """Configuration key of the group."""
        return f"serving.models.{self.model}.groups.{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """Rollout servers. Mirrors hydra_configs/serving/*.yaml key by key."""

    num_devices_per_node: RanksOrZero
    """Devices of the servers on each of ``cluster.num_nodes``; with CPUs one is a process. Groups
    take all of them, in the order of the configuration. 0: all servers run elsewhere."""

    colocated: bool
    """True: the first devices of the servers on a node are those of the trainer. Groups there are
    the engines of the ranks, which sleep while the trainer computes. False: servers have devices of
    their own."""

    router: Literal["none", "sglang"] = "none"
    """Who chooses the engine of a request to the policy. ``none``: the manager takes the least
    loaded, or the one with the conversation's beginning in its cache. ``sglang``: sglang-router,
    by its cache-aware policy."""

    weights: WeightRoute = "files"
    """Way of the weights to the servers. ``files``: a folder in ``$TMPDIR``, which all nodes must
    share. ``broadcast``: a process group of rank 0 and the servers of SGLang."""

    weight_deltas: bool = False
    """True: after the first update of a run only values that changed travel to engines on devices
    of their own. Costs a copy of the model on the host, at rank 0 and in each engine's process."""

    on_update: OnUpdate = "interrupt"
    """With ``trainer.max_staleness``: what new weights do to responses that are being sampled.
    ``interrupt``: they stop at a token, and continue with the new weights. ``finish``: the new
    weights wait for the longest of them; a new adapter does not, and they end with their own.
    ``abort``: they lose their tokens, and begin again with the new weights."""

    models: Mapping[Name, ServedModelConfig]
    """Models by name, each with ``groups`` and ``path``. Empty: no servers; the ranks of the policy
    have the rollout engines."""

    health_timeout_s: Seconds = 60.0
    """Seconds within which an engine that samples must get on, if only by one token; then it counts
    as hung, and is replaced. Longer than its longest step."""

    faults: Mapping[Name, FaultConfig] = field(default_factory=dict)
    """Faults of engines of the policy, by name, to try a cluster; empty: none."""

    @property
    def placed_groups(self) -> list[PlacedGroup]:
        """All groups with their first devices, which follow each other without gaps."""
        return list(self._place())

    @property
    def frozen(self) -> Mapping[str, ServedModelConfig]:
        """Models that keep the weights of their folder."""
        return {name: model for name, model in self.models.items() if model.path is not None}

    @property
    def external(self) -> Mapping[str, ServedModelConfig]:
        """Models whose servers run elsewhere."""
        return {name: model for name, model in self.models.items() if model.urls}

    @property
    def has_external_policy(self) -> bool:
        """Whether servers that others run sample for training."""
        return self.policy in self.external

    @property
    def key_variables(self) -> frozenset[str]:
        """Environment variables with keys of servers."""
        return frozenset(model.key_variable for model in self.models.values() if model.key_variable)

    @property
    def policy(self) -> str:
        """Name of the model that gets the weights of the trainer: of the first without a path.

        Empty if all have one, which is refused.
        """
        return next((name for name, model in self.models.items() if model.path is None), "")

    def _place(self) -> Iterator[PlacedGroup]:
        first_device = 0
        for model, served in self.models.items():
            for name, group in served.groups.items():
                yield PlacedGroup(model, name, group, first_device)
                first_device += group.num_devices
