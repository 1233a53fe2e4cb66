"""What ``mode=plan`` prints: phases and parts, the peak, whether it fits, and what to change."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ModelError
from hybridrl.planning.advice import find_knob, largest_saving
from hybridrl.planning.capacity import capacity_bytes
from hybridrl.planning.memory import plan_critic_pool, plan_memory
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan
from hybridrl.planning.shapes import shape_of

_GIB = 2**30
_MIB = 2**20


def plan_page(config: ExperimentConfig, *, width: int = 120) -> str:
    """Return the whole page.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    plan, shape = plan_memory(config), shape_of(config.model)
    heading = (
        f"memory of one rank ({config.cluster.num_ranks} x {config.cluster.device}"
        f"{_place(config, plan)}), "
        f"{shape.num_parameters / 1e6:,.1f} M parameters, rows of {config.max_row_tokens} tokens; "
        "nothing started"
    )
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(_table(plan), crop=False)
    return f"{heading}\n{text.getvalue()}{verdict(config, plan)}\n{_pool_line(config)}"


def _place(config: ExperimentConfig, plan: MemoryPlan) -> str:
    """Say which stage of a pipeline is the fullest."""
    if plan.stage is None:
        return ""
    return f", stage {plan.stage + 1} of {config.megatron.pipeline_parallel_size}: the fullest"


def _pool_line(config: ExperimentConfig) -> str:
    """Say what a rank of the critic's own pool takes, which no capacity is held against."""
    plan = plan_critic_pool(config)
    if plan is None:
        return ""
    return (
        f"the critic's own ranks ({config.num_critic_ranks} x {config.cluster.device}) come on "
        f"top: {format_bytes(plan.peak_bytes(plan.fullest))} each in {plan.fullest.name}\n"
    )


def peak_line(config: ExperimentConfig) -> str:
    """Say in one line what ``mode=check`` shows of the plan; never raises for a model."""
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
    """Say whether the peak fits the device, and if not the one key to change."""
    peak = plan.peak_bytes(plan.fullest)
    says = f"peak: {format_bytes(peak)} in {plan.fullest.name}"
    capacity = capacity_bytes(config.cluster)
    if capacity is None:
        return f"{says}. Set cluster.device_memory_gib to learn whether it fits"
    if peak <= capacity:
        return f"{says}. Fits: {format_bytes(capacity - peak)} of {format_bytes(capacity)} are left"
    says += f". Does not fit: {format_bytes(peak - capacity)} more than {format_bytes(capacity)}"
    knob = find_knob(config, capacity_bytes=capacity)
    if knob is not None:
        return f"{says}. Set {knob.override}: {format_bytes(knob.peak_bytes)}"
    best = largest_saving(config)
    says += ". No single key makes it fit"
    return (
        says
        if best is None
        else f"{says}; most saves {best.override}: {format_bytes(best.peak_bytes)}"
    )


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people: ``1.23 GiB``, below 1 GiB ``345 MiB``."""
    if abs(num_bytes) < _GIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / _GIB:,.2f} GiB"


def _table(plan: MemoryPlan) -> Table:
    """Parts as rows, phases as columns; on CUDA the host's parts stand apart."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MiB", no_wrap=True)
    for phase in plan.phases:
        mark = " *" if phase is plan.fullest else ""
        table.add_column(phase.name + mark, justify="right", no_wrap=True)
    places = (MemoryKind.DEVICE, MemoryKind.HOST) if plan.device == "cuda" else (None,)
    for place in places:
        for name in plan.part_names:
            items_of_phases = [[p for p in phase.parts if p.name == name] for phase in plan.phases]
            if place in (None, *(p.place for parts in items_of_phases for p in parts)):
                table.add_row(_row_name(name, place), *(_mib(parts) for parts in items_of_phases))
        totals = [
            plan.peak_bytes(phase) if place is not MemoryKind.HOST else phase.bytes_on(place)
            for phase in plan.phases
        ]
        style = "bold" if place is not MemoryKind.HOST else ""
        title = "peak" if place is None else f"peak, {place.value}"
        table.add_row(title, *(f"{total / _MIB:,.0f}" for total in totals), style=style)
    return table


def _row_name(name: str, place: MemoryKind | None) -> str:
    return f"{name} (host)" if place is MemoryKind.HOST else name


def _mib(parts: list[MemoryItem]) -> str:
    return f"{sum(part.num_bytes for part in parts) / _MIB:,.0f}" if parts else "."
