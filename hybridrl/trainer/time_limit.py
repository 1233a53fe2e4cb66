"""A time limit for functions of the user that run in the driver, where no call would end them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from hybridrl.algorithms.load import Part
from hybridrl.errors import TrainingError


def with_time_limit(part: Part, *, timeout_s: float) -> Part:
    """Return the part; one of the user's raises `TrainingError` if a call takes too long.

    Args:
        part: built-in ones are returned as they are.
        timeout_s: seconds of one call (``cluster.call_timeout_s``).
    """
    if ":" not in part.spelled:
        return part
    message = (
        f"{part.key}={part.spelled} took longer than cluster.call_timeout_s={timeout_s:g} s; "
        "correct it, or raise that limit if it is only slow"
    )
    return replace(part, function=partial(_call, part.function, timeout_s, message))


def _call(function: Callable[..., Any], timeout_s: float, message: str, **inputs: object) -> Any:  # noqa: ANN401
    with _limit(timeout_s, message):
        return function(**inputs)


@contextmanager
def _limit(timeout_s: float, message: str) -> Iterator[None]:
    """Raise in the block once the time is over; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TrainingError(message)

    former = signal.signal(signal.SIGALRM, give_up)
    begin = time.monotonic()
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        if remaining_s:  # of a limit around this one
            left_s = remaining_s - (time.monotonic() - begin)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
