"""Memory that a run takes, of each device and machine, beside the size of that memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Colocated, Fused
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.plan import MemoryKind, MemoryPlan, Phase, capacity_bytes
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.planning.served import engine_memory, plan_servers

_GIB = 2**30
_MIB = 2**20
DEVICE = "cluster.device_memory_gib"
HOST = "cluster.host_memory_gib"
SHARE = "rollout.memory_fraction"


@dataclass(frozen=True, slots=True)
class Fit:
    """The most that a run takes of one memory, as predicted."""

    name: str
    detail: str  # when it is fullest, or what it consists of
    num_bytes: int
    capacity: int | None  # bytes; None if unknown
    key: str  # that gives the capacity
    unknown: str = ""  # a part that num_bytes lacks, because it follows from an unknown capacity
    phase: Phase | None = None  # who has it then; None for servers

    @property
    def excess(self) -> int:
        """Bytes that are lacking."""
        return 0 if self.capacity is None else max(0, self.num_bytes - self.capacity)

    @property
    def need(self) -> str:
        """The memory taken, in words."""
        least, more = ("at least ", f", and {self.unknown}") if self.unknown else ("", "")
        return f"{self.name} {least}{format_bytes(self.num_bytes)} {self.detail}{more}"

    def __str__(self) -> str:
        if self.capacity is None:
            return f"{self.need}. Not compared: set {self.key}"
        size = format_bytes(self.capacity)
        if self.excess:
            return f"{self.need}. Does not fit: {format_bytes(self.excess)} more than {size}"
        left = format_bytes(self.capacity - self.num_bytes)
        return f"{self.need}. Fits: {left} of {size} are left"


def find_fits(
    config: ExperimentConfig, plan: MemoryPlan, critic: MemoryPlan | None = None
) -> Iterator[Fit]:
    """Yield the memory of a rank, of the critic's own ranks, of servers, and of a machine.

    Args:
        critic: of a rank of the critic's own; None if there are none.

    Raises:
        ModelError: a model's config.json cannot be read, or is of an unknown family.
    """
    is_cuda, capacity = config.cluster.device == "cuda", capacity_bytes(config.cluster)
    is_served = is_cuda and config.rollout.engine == "sglang"
    cache = (is_served and capacity is None) * (
        f"the KV cache, {SHARE}={config.rollout.memory_fraction} of the device less the weights"
    )
    has_engine = is_served and isinstance(config.topology, Fused | Colocated)
    yield _of_device("peak of a rank", plan, capacity, unknown=cache * has_engine)
    if has_engine:
        yield from _of_share(
            "a rank's engine", engine_memory(config, architecture_of(config.model))
        )
    if critic is not None:
        yield _of_device("peak of a rank of the critic's own", critic, capacity)
    for group, memory in plan_servers(config) if is_cuda else ():
        sizes = {
            "weights": memory.weights,
            "KV cache": memory.kv_cache,
            "other": memory.server_rest,
        }
        parts = ", ".join(f"{part} {format_bytes(n)}" for part, n in sizes.items() if n)
        name = f"servers {group.model}.{group.name}"
        total = sum(sizes.values())
        yield Fit(name, f"a device ({parts})", total, capacity, DEVICE, unknown=cache)
        yield from _of_share(f"an engine of {name}", memory)
    if is_cuda:
        yield _of_machine(config, plan, critic, is_unknown=bool(cache))


def _of_device(name: str, plan: MemoryPlan, capacity: int | None, *, unknown: str = "") -> Fit:
    fullest = plan.fullest
    peak, detail = plan.peak_bytes(fullest), f"in {fullest.name}"
    return Fit(name, detail, peak, capacity, DEVICE, unknown=unknown, phase=fullest)


def _of_share(name: str, memory: RolloutMemory) -> Iterator[Fit]:
    if memory.share:
        detail = "of weights and one row's KV cache"
        yield Fit(name, detail, memory.smallest_share, memory.share, SHARE)


def _of_machine(
    config: ExperimentConfig, plan: MemoryPlan, critic: MemoryPlan | None, *, is_unknown: bool
) -> Fit:
    """Add up the ranks of a machine. A critic's own ranks compute at the same time."""
    num_ranks = config.cluster.num_ranks_per_node
    fullest = _fullest_on_host(plan)
    num_bytes = num_ranks * fullest.bytes_on(MemoryKind.HOST)
    detail = f"of {num_ranks} ranks in {fullest.name}"
    if critic is not None:
        phase, num_critics = _fullest_on_host(critic), config.critic.num_ranks_per_node
        num_bytes += num_critics * phase.bytes_on(MemoryKind.HOST)
        detail += f", {num_critics} of the critic in {phase.name}"
    routes = is_unknown and config.rollout.routed_experts
    unknown = "the experts of every token of the KV cache" * routes
    gib = config.cluster.host_memory_gib
    capacity = None if gib is None else int(gib * _GIB)
    name = "host memory of a machine"
    return Fit(name, detail, num_bytes, capacity, HOST, unknown=unknown, phase=fullest)


def _fullest_on_host(plan: MemoryPlan) -> Phase:
    return max(plan.phases, key=lambda phase: phase.bytes_on(MemoryKind.HOST))


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people: ``1.23 GiB``, below 1 GiB ``345 MiB``."""
    if abs(num_bytes) < _GIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / _GIB:,.2f} GiB"
