"""The life of a rollout engine: its states, and the edges that may be taken between them.

docs/rollout-engines.md draws them; a test compares the drawing with this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """State of an engine in its life cycle."""

    BOOT = "boot"
    READY = "ready"
    PAUSED = "paused"
    DRAINED = "drained"
    ASLEEP = "asleep"
    KV_ASLEEP = "kv_asleep"
    WEIGHTS_UP = "weights_up"
    SYNCED = "synced"
    CACHE_UP = "cache_up"
    BROKEN = "broken"


RESTING = frozenset({State.ASLEEP, State.KV_ASLEEP, State.DRAINED, State.BROKEN})
"""States of an engine that neither serves nor is about to."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal move."""

    name: str
    sources: tuple[State, ...]
    target: State

    if_failed: State = State.BROKEN
    """State of an engine whose move failed: only as much as can be trusted."""


START = Edge("start", (State.BOOT,), State.ASLEEP)
PAUSE = Edge("pause", (State.READY,), State.PAUSED, if_failed=State.PAUSED)
DRAIN = Edge("drain", (State.PAUSED,), State.DRAINED, if_failed=State.PAUSED)
ROLL_BACK = Edge("roll_back", (State.PAUSED, State.DRAINED), State.READY)
RELEASE = Edge("release", (State.DRAINED,), State.ASLEEP)
RELEASE_CACHE = Edge(
    "release_cache",
    (State.DRAINED, State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP),
    State.KV_ASLEEP,
)
RESUME_WEIGHTS = Edge("resume_weights", (State.ASLEEP,), State.WEIGHTS_UP)
SYNC = Edge("sync", (State.WEIGHTS_UP, State.DRAINED, State.KV_ASLEEP), State.SYNCED)
RESUME_CACHE = Edge("resume_cache", (State.SYNCED,), State.CACHE_UP)
CONTINUE = Edge("continue", (State.CACHE_UP,), State.READY)
UNWIND = Edge("unwind", (State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP), State.ASLEEP)
BREAK = Edge("break", tuple(State), State.BROKEN)
RESTART = Edge("restart", (State.BROKEN,), State.BOOT)

EDGES = (
    *(START, PAUSE, DRAIN, ROLL_BACK, RELEASE, RELEASE_CACHE),
    *(RESUME_WEIGHTS, SYNC, RESUME_CACHE, CONTINUE),
    *(UNWIND, BREAK, RESTART),
)
"""Every edge there is; all others raise PhaseError."""
