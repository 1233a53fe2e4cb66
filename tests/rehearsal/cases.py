"""Ranks to rehearse, and what a rehearsal shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridrl.rehearsal.plan import Executed
from hybridrl.rehearsal.server import Call
from tests.rehearsal.faults import Fault


@dataclass(frozen=True, slots=True)
class Case:
    """A rank of a run to rehearse."""

    overrides: tuple[str, ...]
    """``FOLDER/`` in them is where ``folders`` are."""

    folders: Mapping[str, Mapping[str, object]]
    """config.json of the models by the name of their folder; ``model`` is the policy's."""

    num_layers: int | None = None
    """Of the models; None: as few as stand for the full model."""

    rank: int = 0
    num_steps: int = 1
    kind: str = "planned"
    """Of ``other_runs.KINDS``."""

    fault: Fault | None = None
    packages: str | None = None
    """A folder of packages that this case alone has."""


@dataclass(slots=True)
class Shown:
    """What a rehearsal showed."""

    error: str = ""
    """Traceback of what ended it."""

    executed: Executed = field(default_factory=Executed)
    asked: list[Call] = field(default_factory=list)
    """Calls of the server, in order; none if the rank has no server."""

    unopened: list[str] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)
    """Bytes of the rank's training state at the end."""
