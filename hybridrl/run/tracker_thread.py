"""A tracker in a thread of its own: neither its errors nor its delays reach the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Full, Queue
from threading import Thread

from hybridrl.run.trackers import Tracker

log = logging.getLogger(__name__)

MAX_FAILED = 3
MAX_WAITING = 1000
END_S = 60.0


class TrackerThread:
    """Starts a tracker and calls it, in order. The log names the first and the last error.

    At most ``MAX_WAITING`` calls wait for a tracker that is slow; a further one is a failure. Its
    end is waited for ``END_S`` seconds.
    """

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        """Start the tracker, and wait for that; its error is raised here."""
        self._name = name
        self._num_failed = 0
        self._calls: Queue[Callable[[Tracker], None]] = Queue(MAX_WAITING)
        self._is_closed = False
        started: Future[None] = Future()
        # All in one thread: MLflow knows the active run of a thread alone. A daemon, because a
        # tracker that hangs may not keep the process alive.
        self._thread = Thread(target=self._run, args=(start, started), name=name, daemon=True)
        self._thread.start()
        started.result()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over one step. A tracker that has failed too often does not get it."""

        def call(tracker: Tracker) -> None:
            if self._num_failed < MAX_FAILED:
                tracker.log(step, values)

        self._put(call)

    def rewind(self, step: int) -> None:
        """Announce that the steps after ``step`` will be repeated."""
        self._put(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        """End the tracker after the steps that wait, and the thread."""
        self._is_closed = True
        self._put(lambda tracker: None)  # wakes it
        self._thread.join(END_S)
        if self._thread.is_alive():
            log.warning(
                "tracking.trackers=[%s] does not end: left after %g s, with %d steps waiting; "
                "metrics.jsonl has every step",
                *(self._name, END_S, self._calls.qsize()),
            )

    def _put(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._note(TimeoutError(f"{MAX_WAITING} steps wait for it"))

    def _run(self, start: Callable[[], Tracker], started: Future[None]) -> None:
        try:
            tracker = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while not (self._is_closed and self._calls.empty()):
            self._attempt(self._calls.get(), tracker)
        self._attempt(lambda tracker: tracker.close(), tracker)

    def _attempt(self, call: Callable[[Tracker], None], tracker: Tracker) -> None:
        try:
            call(tracker)
        except Exception as error:  # of any kind: trackers are foreign packages
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed in (1, MAX_FAILED):
            log.warning(
                "tracking.trackers=[%s] failed: %s: %s; the run continues; metrics.jsonl has "
                "every step. This was failure %d; after %d the tracker gets no more",
                *(self._name, type(error).__name__, error, self._num_failed, MAX_FAILED),
            )
