"""Records the spans of this process, and writes them to its own file of the run's trace.

    with trace.span("sync", version=3):
        ...
        trace.note(bytes=4096)

Recording is always on, as logging is: a span costs about a microsecond, and events that are never
written are dropped, the oldest first. `write_to` sets the folder. Events are then written when the
outermost span of a thread ends, at most once a second: between calls, and between a driver's steps.

Times are the wall clock at the start of the process plus a clock that never jumps, so spans of one
process are exact to each other. Those of different hosts agree as well as the hosts' clocks do.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident
from typing import TypeVar

from hybridrl.diagnostics.activity import resident_bytes
from hybridrl.diagnostics.trace_file import MAX_BYTES, Event, ProcessTrace, track_id

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Arg = str | int | float | bool

_CLOCK_TO_WALL_NS = time.time_ns() - time.perf_counter_ns()
_WORTH_ASKING_NS = 1_000_000
_WRITE_EVERY_NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has not ended."""

    name: str
    args: dict[str, Arg]
    begin_ns: int


class SpanRecorder:
    """Keeps the spans of one process. Threads may share it; the spans of each nest."""

    def __init__(self, *, capacity: int = 20_000) -> None:
        """Keep at most ``capacity`` events, of about 300 bytes each, until they are written."""
        self.run_folder: Path | None = None
        """Folder of the traced run; None while no run is traced."""
        self._events: deque[Event] = deque(maxlen=capacity)
        self._open: dict[int, list[OpenSpan]] = {}
        self._threads: dict[int, int] = {}
        self._file: ProcessTrace | None = None
        self._lock = Lock()
        self._next_write_ns = 0

    @contextmanager
    def span(self, name: str, **args: Arg) -> Iterator[OpenSpan]:
        """Record how long the block takes; values that vary belong into ``args``, not the name."""
        thread = get_ident()
        stack = self._open.setdefault(thread, [])
        span = OpenSpan(name, args, time.perf_counter_ns())
        stack.append(span)
        try:
            yield span
        finally:
            if span in stack:  # otherwise it ended with the span around it
                self._end(stack, span, self._threads.setdefault(thread, len(self._threads) + 1))
                if not stack and time.perf_counter_ns() >= self._next_write_ns:
                    self.write()

    def _end(self, stack: list[OpenSpan], span: OpenSpan, thread: int) -> None:
        """End a span, and the open spans inside it (of a loop that was left early)."""
        # Both ends are rounded down, not the duration: so spans that nest in nanoseconds nest here.
        end_us = (time.perf_counter_ns() + _CLOCK_TO_WALL_NS) // 1000
        while span in stack:
            ended = stack.pop()
            begin_us = (ended.begin_ns + _CLOCK_TO_WALL_NS) // 1000
            event = {"ph": "X", "name": ended.name, "tid": thread, "ts": begin_us}
            self._events.append(event | {"dur": end_us - begin_us, "args": ended.args})

    def add(self, name: str, begin_ns: int, *, track: int, lane: int = 0, **args: Arg) -> None:
        """Record work that ends now and began at ``time.perf_counter_ns() == begin_ns``.

        For tasks of one thread that take turns, so that their spans do not nest: each conversation
        has a track of its own, shown as a further thread, and lanes for spans that overlap.
        """
        begin_us, end_us = (
            (at_ns + _CLOCK_TO_WALL_NS) // 1000 for at_ns in (begin_ns, time.perf_counter_ns())
        )
        event = {"ph": "X", "name": name, "ts": begin_us, "dur": end_us - begin_us}
        self._events.append(event | {"tid": track_id(track, lane), "args": args})

    def each(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; each pass of the loop is a span, with the item or its index."""
        for index, item in enumerate(items):
            with self.span(name, item=item if isinstance(item, int | str) else index):
                yield item

    def note(self, **args: Arg) -> None:
        """Show ``args`` beside the innermost open span of this thread; numbers add up."""
        stack = self._open.get(get_ident())
        if not stack:
            return
        known = stack[-1].args
        for name, value in args.items():
            before = known.get(name)
            if isinstance(value, str) or isinstance(before, str) or before is None:
                known[name] = value
            else:
                known[name] = before + value

    def note_host_memory(self) -> None:
        """Show the host memory of this process beside the innermost open span of this thread.

        Spans shorter than a millisecond are left out: the query would be most of their time.
        """
        stack = self._open.get(get_ident())
        if not stack or time.perf_counter_ns() - stack[-1].begin_ns < _WORTH_ASKING_NS:
            return
        if num_bytes := resident_bytes():
            self.note(host_bytes=num_bytes)

    def count(self, values: Mapping[str, float]) -> None:
        """Record one point of each counter; a value that is not finite is left out."""
        at_us = (time.perf_counter_ns() + _CLOCK_TO_WALL_NS) // 1000
        for name, value in values.items():
            if math.isfinite(value):
                point = {"ph": "C", "name": name, "tid": 1, "ts": at_us}
                self._events.append(point | {"args": {"value": value}})

    def take(self) -> list[Event]:
        """Return the events that were not written, in the order of their ends, and drop them."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def write_to(self, run_folder: Path, process: str, *, num_processes: int) -> bool:
        """Write events from now on; return whether that works.

        The processes of the run share the size limit of the trace.
        """
        self.end()
        try:
            max_bytes = MAX_BYTES // num_processes
            self._file = ProcessTrace(run_folder, process, max_bytes=max_bytes)
        except OSError as error:
            log.warning("no trace is kept: %s", error)
            return False
        self.run_folder = run_folder
        self.take()
        return True

    def write(self) -> None:
        """Write the pending events. If that fails, warn once, and write no more."""
        with self._lock:
            if self._file is None:
                return
            self.count({"host memory, MiB": resident_bytes() / 2**20})
            try:
                self._file.append(self.take())
            except OSError as error:
                log.warning("the trace ends here: %s", error)
                self._close_file()
            self._next_write_ns = time.perf_counter_ns() + _WRITE_EVERY_NS

    def end(self) -> None:
        """Write the pending events, and no more afterwards. Twice is a no-op."""
        self.write()
        self._close_file()
        self.run_folder = None

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


process = SpanRecorder()
"""The recorder of this process."""

span = process.span
add = process.add
each = process.each
note = process.note
note_host_memory = process.note_host_memory
count = process.count
take = process.take
