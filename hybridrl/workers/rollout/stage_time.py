"""How long one rank may wait for its engine within a stage of sleep or wake.

Ranks wait for each other half as long again (``workers/sharding/control.py``). So every wait of a
rank has ended, with or without success, while the others still wait, and all get the status.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LEAST_WAIT_S = 0.5
"""Seconds of a wait at the end of its stage: enough for an answer that has already arrived."""

_ends_at: ContextVar[float | None] = ContextVar("stage_ends_at", default=None)


@contextmanager
def stage_time(timeout_s: float) -> Iterator[None]:
    """In the block all waits of this thread together take at most ``timeout_s`` seconds."""
    token = _ends_at.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_at.reset(token)


def left_s(at_most_s: float) -> float:
    """Return the seconds that one wait may take: those left in the stage, if one has begun."""
    ends_at = _ends_at.get()
    if ends_at is None:
        return at_most_s
    return min(at_most_s, max(LEAST_WAIT_S, ends_at - time.monotonic()))
