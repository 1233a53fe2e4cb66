"""Memory that a run takes, of each device and machine, beside the size of that memory.

What does not fit names the key to change first. That is a direction: only another plan shows
whether it suffices.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rich.console import Console
from rich.table import Table

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Colocated, Fused
from hybridrl.errors import ConfigError, instruction
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase, capacity_bytes
from hybridrl.planning.rollout import RolloutMemory, plan_servers
from hybridrl.planning.split import count_parameters

_GIB = 2**30
_MIB = 2**20
DEVICE = "cluster.device_memory_gib"
HOST = "cluster.host_memory_gib"
DELTAS = "serving.weight_deltas"
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
    """Yield the memory of a rank, of the critic's own ranks, of servers, and of a machine."""
    is_cuda, capacity = config.cluster.device == "cuda", capacity_bytes(config.cluster)
    is_served = is_cuda and config.rollout.engine == "sglang"
    cache = (is_served and capacity is None) * (
        f"the KV cache, {SHARE}={config.rollout.memory_fraction} of the device less the weights"
    )
    has_engine = is_served and isinstance(config.topology, Fused | Colocated)
    yield _of_device("peak of a rank", plan, capacity, unknown=cache * has_engine)
    if has_engine:
        yield from _of_share(
            "a rank's engine", RolloutMemory(config, architecture_of(config.model))
        )
    if critic is not None:
        yield _of_device("peak of a rank of the critic's own", critic, capacity)
    for group, memory in plan_servers(config) if is_cuda else ():
        sizes = {
            "weights": memory.weights,
            "KV cache": memory.kv_cache,
            "other": memory.server_graphs + memory.server_resident + memory.computing,
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
    if num_copies := _copies_of_weights(config):
        rollout = replace(config.rollout, tensor_parallel_size=1)
        model = architecture_of(config.model)
        copy = RolloutMemory(replace(config, rollout=rollout), model).base_weights
        num_bytes += num_copies * copy
        detail += f", {num_copies} copies of the weights ({DELTAS})"
    routes = is_unknown and config.returns_experts
    unknown = "the experts of every token of the KV cache" * routes
    gib = config.cluster.host_memory_gib
    capacity = None if gib is None else int(gib * _GIB)
    name = "host memory of a machine"
    return Fit(name, detail, num_bytes, capacity, HOST, unknown=unknown, phase=fullest)


def _copies_of_weights(config: ExperimentConfig) -> int:
    """Count those on a machine: what rank 0 has sent, and what each own engine there has."""
    serving = config.serving
    if not serving.weight_deltas:
        return 0
    machines = Counter(
        (group.first_device + place * group.config.devices_per_engine)
        // serving.num_devices_per_node
        for group in serving.placed_groups
        if group.model == serving.policy and not config.is_on_trainer(group)
        for place in range(group.config.num_engines)
    )
    return 1 + max(machines.values(), default=len(serving.models[serving.policy].urls))


def _fullest_on_host(plan: MemoryPlan) -> Phase:
    return max(plan.phases, key=lambda phase: phase.bytes_on(MemoryKind.HOST))


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people: ``1.23 GiB``, below 1 GiB ``345 MiB``."""
    if abs(num_bytes) < _GIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / _GIB:,.2f} GiB"


_MOST = 0.95  # of a device for an engine
_FEWEST_TOKENS = 128  # tokens of a chunk of logits: smaller chunks save little
_OF_ENGINE = ("KV cache", "rollout weights", "SGLang's graphs")
_OF_TRAINING = ("optimizer", "actor weights", "gradients")
_MOST_ADVICE = "take more devices: raise cluster.num_ranks_per_node or cluster.num_nodes"


def find_misfits(config: ExperimentConfig, fits: Iterable[Fit]) -> list[ConfigError]:
    """Return an error for each memory that is too small; it names the key to change first."""
    return [
        ConfigError(
            fit.key,
            attrgetter(fit.key)(config),
            f"{fit.need}, {format_bytes(fit.excess)} more than there is",
            _advise(config, fit),
        )
        for fit in fits
        if fit.excess
    ]


def _advise(config: ExperimentConfig, misfit: Fit) -> str:
    if misfit.key == SHARE:
        fraction = config.rollout.memory_fraction * misfit.num_bytes / max(1, misfit.capacity or 1)
        more_ranks = f"rollout.tensor_parallel_size={2 * config.rollout.tensor_parallel_size}"
        more_of_device = f"{SHARE}={math.ceil(100 * fraction) / 100}"
        return instruction((more_of_device if fraction <= _MOST else more_ranks,))
    if misfit.phase is None:  # of a server: its cache is all that can be less
        items = [MemoryItem("KV cache", misfit.num_bytes)]
    else:
        is_on_host = misfit.key == HOST
        items = sorted(
            (item for item in misfit.phase.items if (item.kind is MemoryKind.HOST) == is_on_host),
            key=attrgetter("num_bytes"),
            reverse=True,
        )
    for item in items:
        if override := next(_overrides(config, item.name, misfit), ""):
            size = format_bytes(item.num_bytes)
            return f"{instruction((override,))}: {item.name} of {size} fill most that can be less"
    return _MOST_ADVICE


def _overrides(config: ExperimentConfig, use: str, misfit: Fit) -> Iterator[str]:
    """Yield what makes a use of memory smaller, the cheapest first."""
    actor, rollout = config.actor, config.rollout
    is_megatron, is_on_device = bool(config.megatron_worlds), misfit.key == DEVICE
    fraction = rollout.memory_fraction - misfit.excess / max(1, misfit.capacity or 1)
    tokens = max(config.max_row_tokens, actor.max_tokens_per_microbatch // 2)
    chunk = actor.logprob_chunk_tokens // 2
    moved = is_megatron or actor.fsdp2.cpu_offload
    keeps_base = rollout.sleep and config.lora.sends_adapters and config.lora.base == "resident"
    num_sharing = 2 * actor.fsdp2.context_parallel_size
    worlds = (config.cluster.num_ranks, config.num_critic_ranks)
    has_state = architecture_of(config.model).delta_net is not None
    can_share = not has_state and all(num_ranks % num_sharing == 0 for num_ranks in worlds)
    for uses, helps, override in (
        (("KV cache",), fraction > 0, f"{SHARE}={math.floor(100 * fraction) / 100}"),
        (_OF_ENGINE, not rollout.sleep, "rollout.sleep=true"),
        (("rollout weights",), keeps_base, "lora.base=backup"),
        (("logits",), chunk >= _FEWEST_TOKENS, f"actor.logprob_chunk_tokens={chunk}"),
        (
            ("activations",),
            not actor.gradient_checkpointing,
            "actor.gradient_checkpointing=true",
        ),
        (
            ("activations",),
            tokens < actor.max_tokens_per_microbatch,
            f"actor.max_tokens_per_microbatch={tokens}",
        ),
        (
            ("activations",),
            not is_megatron and can_share,
            f"actor.fsdp2.context_parallel_size={num_sharing}",
        ),
        (
            ("activations",),
            is_megatron and not config.megatron.sequence_parallel,
            "megatron.sequence_parallel=true",
        ),
        (
            ("gathered weights",),
            not actor.fsdp2.reshard_after_forward,
            "actor.fsdp2.reshard_after_forward=true",
        ),
        (_OF_TRAINING, is_on_device and not moved, "actor.fsdp2.cpu_offload=true"),
        (("checkpoint",), True, "checkpoint.every_num_steps=0"),
        (("offloaded training state",), rollout.sleep, "rollout.sleep=false"),
    ):
        if use in uses and helps:
            yield override


_ON_A_CPU = (
    "The plan is that of a GPU. On a CPU malloc keeps memory that was freed: training took 1.1 to "
    "2.2 times what was planned, see docs/memory.md\n"
)


def plan_page(config: ExperimentConfig, plan: MemoryPlan, fits: Sequence[Fit]) -> str:
    """Return the page of ``mode=plan``."""
    num_parameters = count_parameters(architecture_of(config.model))
    ranks = f"{config.cluster.num_ranks} x {config.cluster.device}"
    if plan.stage is not None:
        num_stages = config.megatron.pipeline_parallel_size
        ranks += f", stage {plan.stage + 1} of {num_stages}: the fullest"
    text = io.StringIO()
    console = Console(file=text, width=120)
    console.print(_table(plan), crop=False)
    lines = "\n".join(memory_lines(fits))
    return (
        f"memory of one rank ({ranks}), {num_parameters / 1e6:,.1f} M parameters, rows of "
        f"{config.max_row_tokens} tokens, engines for {config.max_context_tokens}; "
        "nothing started\n"
        f"{text.getvalue()}{lines}\n{_ON_A_CPU * (plan.device == 'cpu')}"
    )


def memory_lines(fits: Sequence[Fit]) -> list[str]:
    """Return a line for each memory of the run."""
    return [str(fit) for fit in fits if fit.excess or fit.key != SHARE]


def _table(plan: MemoryPlan) -> Table:
    """Lay out items as rows and phases as columns; on CUDA host memory has its own table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MiB", no_wrap=True)
    for phase in plan.phases:
        mark = " *" if phase is plan.fullest else ""
        table.add_column(phase.name + mark, justify="right", no_wrap=True)
    is_cuda = plan.device == "cuda"
    names = dict.fromkeys(item.name for phase in plan.phases for item in phase.items)
    for kind in (MemoryKind.DEVICE, MemoryKind.HOST) if is_cuda else (None,):
        is_host = kind is MemoryKind.HOST
        for name in names:
            cells = [[i for i in phase.items if i.name == name] for phase in plan.phases]
            if kind is None or any(item.kind is kind for items in cells for item in items):
                table.add_row(name + " (host)" * is_host, *map(_mib, cells))
        totals = [
            p.bytes_on(MemoryKind.HOST) if is_host else plan.peak_bytes(p) for p in plan.phases
        ]
        title = f"peak, {kind.value}" if kind else "peak"
        style = "" if is_host else "bold"
        table.add_row(title, *(f"{total / _MIB:,.0f}" for total in totals), style=style)
    return table


def _mib(items: list[MemoryItem]) -> str:
    return f"{sum(item.num_bytes for item in items) / _MIB:,.0f}" if items else "."
