"""The gate of an embedded engine: one generate call at a time, none while paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from hybridrl.errors import DeadlineError, EngineError, PhaseError

_ABORT_GRACE_S = 60.0


def _nothing() -> None:
    """Requests in this process end at their next check."""


class GenerateCall:
    """One admitted generate call; an abort reaches it in ``check``."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.num_aborted = 0
        self.is_cancelled = False

    def check(self, num_unfinished: int) -> None:
        """Raise if the call was aborted. Called once per decode step.

        Raises:
            EngineError: the engine was drained and the call outlived the deadline.
        """
        if self.is_cancelled:
            self.num_aborted = num_unfinished
            raise EngineError(
                f"aborted {num_unfinished} of {self.num_requests} requests: the engine was drained "
                "before they ended; raise rollout.drain_timeout_s to let them finish"
            )


class RequestGate:
    """Thread-safe: ``generate`` may run in one thread while another pauses and drains."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_paused = False
        self._running: GenerateCall | None = None

    @contextmanager
    def admit(self, num_requests: int) -> Iterator[GenerateCall]:
        """Hold the engine for one generate call.

        Raises:
            PhaseError: the engine is paused, or another call is running.
        """
        with self._changed:
            if self._is_paused:
                raise PhaseError(
                    "generate was refused: the engine is paused; it admits requests again after "
                    "continue_generation"
                )
            self._require_idle("generate")
            call = self._running = GenerateCall(num_requests)
        try:
            yield call
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def require_idle(self, edge: str) -> None:
        """Raise PhaseError if a generate call is running; ``edge`` names the refused request."""
        with self._changed:
            self._require_idle(edge)

    def _require_idle(self, edge: str) -> None:
        if self._running is not None:
            raise PhaseError(
                f"{edge} was refused: {self._running.num_requests} requests are running; "
                "pause and drain the engine first"
            )

    def pause(self) -> None:
        """Admit no call from now on. Idempotent."""
        with self._changed:
            self._is_paused = True

    def resume(self) -> None:
        """Admit again. Idempotent."""
        with self._changed:
            self._is_paused = False

    def drain(
        self,
        timeout_s: float,
        *,
        abort: Callable[[], None] = _nothing,
        grace_s: float = _ABORT_GRACE_S,
    ) -> int:
        """Wait until the running call ended; abort it at the deadline.

        Args:
            timeout_s: seconds until then.
            abort: ends requests that run elsewhere; called at the deadline.
            grace_s: seconds that an aborted call may take to end.

        Returns:
            The number of requests aborted.

        Raises:
            DeadlineError: the aborted call did not reach its next check within ``grace_s``.
        """
        with self._changed:
            call = self._running
            if call is None or self._changed.wait_for(lambda: self._running is None, timeout_s):
                return 0
            call.is_cancelled = True
        abort()
        with self._changed:
            if not self._changed.wait_for(lambda: self._running is not call, grace_s):
                raise DeadlineError(
                    f"{call.num_requests} requests ignored their abort for {grace_s:.0f} "
                    "s: a decode step hangs; restart the engine"
                )
            return call.num_aborted
