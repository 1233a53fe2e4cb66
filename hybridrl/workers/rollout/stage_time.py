"""How long one rank may wait for its engine within a stage of sleep or wake.

Ranks wait for each other half as long again (``workers/sharding/control.py``). So whatever a rank
waits for has ended, well or not, while the others still listen, and all hear how it went.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LEAST_WAIT_S = 0.5
"""What a wait gets at the end of its stage: enough for an answer that is there already."""

_ends_at: ContextVar[float | None] = ContextVar("stage_ends_at", default=None)


@contextmanager
def stage_time(timeout_s: float) -> Iterator[None]:
    """Within this all waits of this thread together take at most ``timeout_s`` seconds."""
    token = _ends_at.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_at.reset(token)


def left_s(at_most_s: float) -> float:
    """Return the seconds that one wait may take: what is left of the stage, if one has begun."""
    ends_at = _ends_at.get()
    if ends_at is None:
        return at_most_s
    return min(at_most_s, max(LEAST_WAIT_S, ends_at - time.monotonic()))
