"""Ctrl-C, SIGTERM and SIGHUP end a run after the step they fall into, saved, and with their status.

A batch system or a shell (``a && b``) must see that a run is not done. So a stopped run ends with
128 + the signal's number, as in shells.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run in order."""

ECHO_S = 1.0
"""A batch system sends a signal to all processes, and those who wait for the run hand it on: so it
may come twice, and means one thing."""

_Handler = Callable[[int, FrameType | None], object]


class RunStopped(SystemExit):
    """A signal stopped a run before its last step; its work is saved."""

    def __init__(self, number: int) -> None:
        """Make the process end with 128 + ``number``, if this is not caught."""
        super().__init__(exit_status(number))


class RunInterrupted(KeyboardInterrupt):
    """A signal ended a run at once."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(number: int) -> int:
    """Return the exit status of a process that a signal made end in order."""
    return 128 + number


class Interrupt:
    """A request to stop the run."""

    def __init__(self) -> None:
        self._number = 0
        self._since_s = 0.0
        self._is_unfinished = False

    @property
    def is_set(self) -> bool:
        """Whether somebody asked."""
        return bool(self._number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the first SIGINT, SIGTERM or SIGHUP; a second one interrupts at once."""
        with handled_by(self._on_signal):
            yield

    def note_unfinished(self) -> None:
        """Remember that the request was granted, with steps left to do."""
        self._is_unfinished = True

    def raise_if_unfinished(self) -> None:
        """Raise RunStopped if there were steps left to do; once all is saved."""
        if self._is_unfinished:
            raise RunStopped(self._number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.is_set and (number != self._number or now_s - self._since_s > ECHO_S):
            raise RunInterrupted(number)
        if self.is_set:
            return
        self._number, self._since_s = number, now_s
        log.warning(
            "%s: stopping after this step; once more stops at once", signal.Signals(number).name
        )


@contextmanager
def ended_by_signals(on_signal: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let the signals end work outside of a step at once and in order, with workers and Ray.

    ``on_signal`` is called before anything ends. Ray's own handlers, which this replaces, end the
    driver with other statuses.
    """
    since_s = -math.inf

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal since_s
        now_s = time.monotonic()
        if now_s - since_s > ECHO_S:  # an echo would hit the clearing up
            since_s = now_s
            on_signal()
            raise RunInterrupted(number)

    with handled_by(interrupt):
        yield


@contextmanager
def handled_by(
    handler: _Handler | signal.Handlers, signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Handle signals in the block; those that are ignored under nohup stay so."""
    if threading.current_thread() is not threading.main_thread():  # it alone gets signals
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup a run outlives its terminal
        del before[signal.SIGHUP]
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
