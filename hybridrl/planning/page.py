"""The page of ``mode=plan``: phases and items, the peak, whether it fits, and a key to change."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from hybridrl.config.architecture import architecture_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ModelError
from hybridrl.planning.memory import plan_critic_pool, plan_memory
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, capacity_bytes
from hybridrl.planning.served import plan_servers
from hybridrl.planning.split import count_parameters
from hybridrl.planning.suggestions import largest_saving, suggest_override

_GIB = 2**30
_MIB = 2**20
_ON_A_CPU = (
    "On a CPU malloc keeps memory that was freed: training took up to two thirds more than "
    "planned, see docs/memory.md\n"
)


def plan_page(config: ExperimentConfig, *, width: int = 120) -> str:
    """Return the page.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    plan, num_parameters = plan_memory(config), count_parameters(architecture_of(config.model))
    ranks = f"{config.cluster.num_ranks} x {config.cluster.device}"
    if plan.stage is not None:
        num_stages = config.megatron.pipeline_parallel_size
        ranks += f", stage {plan.stage + 1} of {num_stages}: the fullest"
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(_table(plan), crop=False)
    return (
        f"memory of one rank ({ranks}), {num_parameters / 1e6:,.1f} M parameters, rows of "
        f"{config.max_row_tokens} tokens; nothing started\n"
        f"{text.getvalue()}{verdict(config, plan)}\n{_pool_line(config)}{_server_lines(config)}"
        f"{_ON_A_CPU * (plan.device == 'cpu')}"
    )


def _pool_line(config: ExperimentConfig) -> str:
    """Describe a rank of the critic's own pool. Its memory is not compared with a capacity."""
    plan = plan_critic_pool(config)
    if plan is None:
        return ""
    return (
        f"the critic's own ranks ({config.num_critic_ranks} x {config.cluster.device}) come on "
        f"top: {format_bytes(plan.peak_bytes(plan.fullest))} each in {plan.fullest.name}\n"
    )


def _server_lines(config: ExperimentConfig) -> str:
    """Describe a device of each group of servers, and whether it fits."""
    lines = []
    capacity = capacity_bytes(config.cluster) if config.cluster.device == "cuda" else None
    for memory in plan_servers(config):
        group = memory.group.config
        fits = ""
        if capacity is not None:
            room = capacity - memory.total
            fits = f". Fits: {format_bytes(room)} are left"
            if room < 0:
                fits = f". Does not fit: {format_bytes(-room)} more than {format_bytes(capacity)}"
        lines.append(
            f"servers {memory.group.model}.{memory.group.name} ({group.num_engines} engines x "
            f"{group.devices_per_engine} {config.cluster.device}, {group.worker_type}): "
            f"{format_bytes(memory.total)} a device (weights {format_bytes(memory.weights)}, "
            f"KV cache {format_bytes(memory.kv_cache)}, other {format_bytes(memory.other)}){fits}\n"
        )
    return "".join(lines)


def peak_line(config: ExperimentConfig) -> str:
    """Return the plan as one line for ``mode=check``; never raises because of a model."""
    try:
        plan = plan_memory(config)
    except ModelError as error:
        return f"{'memory':<12} unknown: {error}"
    peak = plan.fullest
    return (
        f"{'memory':<12} peak of a rank {format_bytes(plan.peak_bytes(peak))} in {peak.name}, "
        "as predicted; see mode=plan"
    )


def verdict(config: ExperimentConfig, plan: MemoryPlan) -> str:
    """Return whether the peak fits the device; if it does not, name the one key to change."""
    peak = plan.peak_bytes(plan.fullest)
    text = f"peak: {format_bytes(peak)} in {plan.fullest.name}"
    capacity = capacity_bytes(config.cluster)
    if capacity is None:
        return f"{text}. Set cluster.device_memory_gib to learn whether it fits"
    if peak <= capacity:
        return f"{text}. Fits: {format_bytes(capacity - peak)} of {format_bytes(capacity)} are left"
    text += f". Does not fit: {format_bytes(peak - capacity)} more than {format_bytes(capacity)}"
    if suggestion := suggest_override(config, capacity_bytes=capacity):
        return f"{text}. Set {suggestion.override}: {format_bytes(suggestion.peak_bytes)}"
    text += ". No single key makes it fit"
    if best := largest_saving(config):
        text += f"; most saves {best.override}: {format_bytes(best.peak_bytes)}"
    return text


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people: ``1.23 GiB``, below 1 GiB ``345 MiB``."""
    if abs(num_bytes) < _GIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / _GIB:,.2f} GiB"


def _table(plan: MemoryPlan) -> Table:
    """Lay out items as rows and phases as columns; on CUDA host memory has its own table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MiB", no_wrap=True)
    for phase in plan.phases:
        mark = " *" if phase is plan.fullest else ""
        table.add_column(phase.name + mark, justify="right", no_wrap=True)
    is_cuda = plan.device == "cuda"
    for kind in (MemoryKind.DEVICE, MemoryKind.HOST) if is_cuda else (None,):
        is_host = kind is MemoryKind.HOST
        for name in plan.item_names:
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
