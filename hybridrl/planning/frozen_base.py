"""Chooses where a sleeping rollout engine keeps its frozen weights, under ``lora.base=auto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.plan import WITH_ENGINE, MemoryPlan

Base = Literal["resident", "backup", "resend"]

_DEVICE_MARGIN = 1.1  # assumed: no GPU has measured how far a plan is off
_HOST_MARGIN = 1.2
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class BasePlan:
    """The driver's knowledge before a worker starts."""

    base_bytes: int
    """Frozen weights of one engine on one rank, with its adapter."""

    peak_bytes: int
    """Device memory while training, frozen weights of the engine included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Measurements of one rank on its empty device."""

    free_device_bytes: int
    free_host_bytes: int
    """The rank's share of the node's memory."""

    host_bytes_per_s: float
    """Mean of a copy to pinned memory and a copy back."""

    resend_bytes_per_s: float
    """Gathered from all ranks and copied on the device."""


def has_choice(config: ExperimentConfig) -> bool:
    """Whether ``lora.base=auto`` depends on the memory of this run."""
    lora = config.lora
    sleeps = config.rollout.sleep and config.cluster.device == "cuda"
    return lora.sends_adapters and lora.base == "auto" and sleeps


def base_plan(plan: MemoryPlan) -> BasePlan:
    """Return the numbers of a plan with ``lora.base=resident`` that the choice depends on."""
    training = [phase for phase in plan.phases if phase.name not in WITH_ENGINE]
    return BasePlan(
        base_bytes=max(
            item.num_bytes
            for phase in training
            for item in phase.items
            if item.name == "rollout weights"
        ),
        peak_bytes=max(plan.peak_bytes(phase) for phase in training),
    )


def choose_base(plan: BasePlan | None, ranks: Sequence[RankFacts]) -> tuple[Base, str]:
    """Choose for all ranks alike, by the rank with the least memory.

    Weights that stay resident cost no time, so they stay where the plan fits. Otherwise the
    faster copy is chosen: to the host and back, or from the trainer again. If host memory is
    short, only a copy from the trainer remains.

    Returns the choice, and its reason with the numbers. There is no plan where host and device are
    the same memory, or engines do not sleep.
    """
    if plan is None:
        return "resident", "there is no device memory to win by moving it"
    free = min(rank.free_device_bytes for rank in ranks)
    needed = int(plan.peak_bytes * _DEVICE_MARGIN)
    fits = f"training needs {needed / _GIB:.1f} GiB with it, {free / _GIB:.1f} GiB are free"
    if needed <= free:
        return "resident", fits
    host = min(rank.free_host_bytes for rank in ranks)
    if host < plan.base_bytes * _HOST_MARGIN:
        short = f"the host has {host / _GIB:.1f} GiB for {plan.base_bytes / _GIB:.1f} GiB"
        return "resend", f"{fits}; {short}"
    backup_s = 2 * plan.base_bytes / min(rank.host_bytes_per_s for rank in ranks)
    resend_s = plan.base_bytes / min(rank.resend_bytes_per_s for rank in ranks)
    times = f"{fits}; to the host and back takes {backup_s:.2f} s, again {resend_s:.2f} s a step"
    return ("backup" if backup_s <= resend_s else "resend"), times
