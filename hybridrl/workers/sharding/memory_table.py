"""Who holds what of a device: the table that comes with an engine that did not find room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Holder:
    """One line of the table."""

    name: str
    num_bytes: int


def device_figures(device: torch.device) -> tuple[Holder, ...]:
    """Return what torch's allocator and the driver say; nothing on a CPU."""
    if device.type != "cuda":
        return ()
    free, total = torch.cuda.mem_get_info(device)
    return (
        Holder("torch allocated, this process", torch.cuda.memory_allocated(device)),
        Holder("torch reserved, this process", torch.cuda.memory_reserved(device)),
        Holder("device free", free),
        Holder("device total", total),
    )


def memory_table(title: str, *sections: Sequence[Holder]) -> str:
    """Lay out sections of holders in MiB, the largest of each section first.

    Args:
        title: first line.
        sections: lines that belong together; what holds nothing is left out, and an empty section.
    """
    shown = [
        sorted((h for h in section if h.num_bytes), key=lambda h: -h.num_bytes)
        for section in sections
    ]
    holders = [holder for section in shown for holder in section]
    if not holders:
        return f"{title}: nobody here holds any"
    width = max(len(holder.name) for holder in holders)
    lines = [f"  {h.name:<{width}} {h.num_bytes / _MIB:>12,.1f} MiB" for h in holders]
    return "\n".join([f"{title}:", *lines])
