"""What a memory plan is: phases of a run, each a list of what is in memory at its worst moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MemoryKind(Enum):
    """Where bytes lie. On a CPU both are the same memory."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Something that takes memory on one rank."""

    name: str
    num_bytes: int
    place: MemoryKind = MemoryKind.DEVICE

    is_measured: bool = True
    """False for what the meter of a run does not see: the process before its engines, and what
    a GPU holds outside torch's allocator."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run at the moment when it needs most."""

    name: str
    """As in the metric ``memory/<name>_peak_bytes/max``."""

    parts: tuple[MemoryItem, ...]

    def bytes_on(self, place: MemoryKind) -> int:
        """Return what lies in that place."""
        return sum(part.num_bytes for part in self.parts if part.place is place)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the fullest rank, phase by phase, in the order of a run."""

    device: str
    """cpu or cuda."""

    phases: tuple[Phase, ...]

    stage: int | None = None
    """Of the pipeline, from 0: the one of that rank. None where there is no pipeline."""

    def peak_bytes(self, phase: Phase) -> int:
        """Return the bytes on the device; on a CPU those of the host lie in the same memory."""
        host = phase.bytes_on(MemoryKind.HOST) if self.device == "cpu" else 0
        return phase.bytes_on(MemoryKind.DEVICE) + host

    def measured_bytes(self, phase: Phase) -> int:
        """Return the part of ``peak_bytes`` that the meter of a run sees."""
        unseen = sum(
            part.num_bytes
            for part in phase.parts
            if not part.is_measured and (self.device == "cpu" or part.place is MemoryKind.DEVICE)
        )
        return self.peak_bytes(phase) - unseen

    @property
    def fullest(self) -> Phase:
        """The phase that decides whether the run fits."""
        return max(self.phases, key=self.peak_bytes)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Every part of any phase, in order of appearance."""
        return tuple(dict.fromkeys(part.name for phase in self.phases for part in phase.parts))
