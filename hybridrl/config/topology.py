"""Where the rollout engines of a run stand, and which of them ranks lead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hybridrl.config.serving import PlacedGroup


@dataclass(frozen=True, slots=True)
class LedDevices:
    """A rollout engine on devices of the trainer: the first of their ranks owns it."""

    ranks: range
    """Adjacent ranks of one node, whose devices it has while the trainer does not compute."""

    group: PlacedGroup | None = None
    """Of ``serving.models``. None: it is an engine of the run's own settings."""

    folder: Path | None = None
    """Of a frozen model; None: of the policy, which gets weights in each step."""

    @property
    def leader(self) -> int:
        """The rank that owns it."""
        return self.ranks.start

    @property
    def model(self) -> str:
        """Name of its model; empty without ``serving.models``."""
        return "" if self.group is None else self.group.model

    @property
    def answers(self) -> bool:
        """Whether requests for responses go to it."""
        return self.group is None or self.group.config.worker_type in ("regular", "decode")


@dataclass(frozen=True, slots=True)
class Fused:
    """Each engine is led by a rank, which asks it for the responses to its own prompts."""

    num_ranks: int
    size: int
    """Ranks of each engine."""

    has_others: ClassVar = False

    @property
    def engines(self) -> tuple[LedDevices, ...]:
        """All engines; rules ask for the kind of a topology alone, of clusters of any size."""
        begins = range(0, self.num_ranks, self.size)
        return tuple(LedDevices(range(begin, begin + self.size)) for begin in begins)


@dataclass(frozen=True, slots=True)
class Colocated:
    """Ranks lead engines and lend them to the rollout manager, which may have others beside."""

    engines: tuple[LedDevices, ...]

    has_others: bool


@dataclass(frozen=True, slots=True)
class Own:
    """The rollout manager has all engines, on devices of their own."""

    engines: ClassVar[tuple[LedDevices, ...]] = ()
    has_others: ClassVar = True


@dataclass(frozen=True, slots=True)
class Attached:
    """Other people run the servers of the policy."""

    engines: ClassVar[tuple[LedDevices, ...]] = ()
    has_others: ClassVar = True


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing is sampled: the run learns from rows, or replays a dump."""

    engines: ClassVar[tuple[LedDevices, ...]] = ()
    has_others: ClassVar = False


Topology = Fused | Colocated | Own | Attached | Absent
"""Each has the ``engines`` that ranks lead, and ``has_others``: whether the policy has engines that
no rank owns."""
