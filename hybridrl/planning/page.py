"""The page of ``mode=plan``: phases and items, and for each memory whether the run fits."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.fit import SHARE, Fit
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan
from hybridrl.planning.split import count_parameters

_MIB = 2**20
_ON_A_CPU = (
    "The plan is that of a GPU. On a CPU malloc keeps memory that was freed: training took up to "
    "two thirds more than planned, see docs/memory.md\n"
)


def plan_page(
    config: ExperimentConfig, plan: MemoryPlan, fits: Sequence[Fit], *, width: int = 120
) -> str:
    """Return the page.

    Args:
        width: of a line, in columns.
    """
    num_parameters = count_parameters(architecture_of(config.model))
    ranks = f"{config.cluster.num_ranks} x {config.cluster.device}"
    if plan.stage is not None:
        num_stages = config.megatron.pipeline_parallel_size
        ranks += f", stage {plan.stage + 1} of {num_stages}: the fullest"
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(_table(plan), crop=False)
    lines = "\n".join(memory_lines(fits))
    return (
        f"memory of one rank ({ranks}), {num_parameters / 1e6:,.1f} M parameters, rows of "
        f"{config.max_row_tokens} tokens; nothing started\n"
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
