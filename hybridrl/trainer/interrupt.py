"""Ctrl-C and SIGTERM end a run after the step they fall into."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class Interrupt:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the first SIGINT or SIGTERM; a second one interrupts at once.

        Does nothing outside the main thread, where Python delivers no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, self._on_signal)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        log.warning(
            "%s: stopping after this step; once more stops at once", signal.Signals(number).name
        )
