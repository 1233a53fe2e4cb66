"""What a process did, and when: spans in a bounded buffer, for the run's trace and post-mortems.

    with trace.span("sync", version=3):
        ...
        trace.note(bytes=4096)

Recording is always on, as logging is: a span costs about a microsecond, nothing is formatted, and
what nobody fetches is forgotten, the oldest first. ``tracking.trace`` decides whether the driver
fetches the spans of all ranks and writes them down; see ``run/tracing.py``.

Times are the wall clock at the start of the process plus a clock that never jumps, so spans of one
process are exact to each other. Those of different hosts agree as well as the hosts' clocks do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from threading import get_ident
from types import TracebackType
from typing import NamedTuple, TypeVar

from hybridrl.diagnostics.activity import resident_bytes

Item = TypeVar("Item")
Arg = str | int | float | bool

_CLOCK_TO_WALL_NS = time.time_ns() - time.perf_counter_ns()


class SpanRecord(NamedTuple):
    """One span as it travels and is written."""

    name: str
    begin_ns: int
    """Nanoseconds since 1970."""
    duration_ns: int
    """So far, if ``is_open``."""
    thread: int
    """The operating system's number of the thread, as Python knows it."""
    args: dict[str, Arg]
    is_open: bool
    """True if the process is still inside."""


class SpanBatch(NamedTuple):
    """What a process recorded since it was asked last."""

    spans: list[SpanRecord]
    num_dropped: int
    """Spans that were forgotten because nobody asked in time."""
    at_ns: int
    """When it was asked, nanoseconds since 1970."""
    host_bytes: int
    """Host memory of the process at that time; 0 where the system does not tell."""


class Span:
    """A stretch of work; a context manager. Made by ``SpanRecorder.span``."""

    __slots__ = ("_recorder", "args", "begin_ns", "end_ns", "name", "thread")

    def __init__(self, recorder: SpanRecorder, name: str, args: dict[str, Arg]) -> None:
        self._recorder = recorder
        self.name = name
        self.args = args
        self.begin_ns = self.end_ns = 0
        self.thread = 0

    def __enter__(self) -> Span:
        self.thread = get_ident()
        self._recorder.enter(self)
        self.begin_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.leave(self, time.perf_counter_ns())

    def record(self) -> SpanRecord:
        """Return it as plain data, on the wall clock."""
        end_ns = self.end_ns or time.perf_counter_ns()
        return SpanRecord(
            self.name,
            self.begin_ns + _CLOCK_TO_WALL_NS,
            end_ns - self.begin_ns,
            self.thread,
            self.args,
            is_open=not self.end_ns,
        )


class SpanRecorder:
    """Keeps the spans of one process. Threads may share it; the spans of each nest."""

    def __init__(self, *, capacity: int = 20_000, num_recent: int = 200) -> None:
        """Keep at most ``capacity`` spans until they are taken; always ``num_recent`` of the last.

        Args:
            capacity: about 300 bytes each.
            num_recent: stay readable by ``recent`` after they were taken.
        """
        self._finished: deque[Span] = deque(maxlen=capacity)
        self._recent: deque[Span] = deque(maxlen=num_recent)
        self._open: dict[int, list[Span]] = {}
        self._num_finished = 0
        self._num_taken = 0

    def span(self, name: str, **args: Arg) -> Span:
        """Return a context manager that records how long its body took.

        Args:
            name: what is done, the same each time; what differs goes into ``args``.
            args: plain values to show beside it.
        """
        return Span(self, name, args)

    def each(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``; what the loop does with each is a span, with the item or its place."""
        for place, item in enumerate(items):
            with self.span(name, item=item if isinstance(item, int | str) else place):
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
        """Show the host memory of this process beside the innermost open span of this thread."""
        num_bytes = resident_bytes()
        if num_bytes:
            self.note(host_bytes=num_bytes)

    def take(self) -> SpanBatch:
        """Return what ended since the last time, in the order in which it ended."""
        spans: list[SpanRecord] = []
        while self._finished:
            spans.append(self._finished.popleft().record())
        num_dropped = self._num_finished - self._num_taken - len(spans)
        self._num_taken = self._num_finished
        now_ns = time.perf_counter_ns() + _CLOCK_TO_WALL_NS
        return SpanBatch(spans, max(0, num_dropped), now_ns, resident_bytes())

    def recent(self) -> list[SpanRecord]:
        """Return the last spans that ended, then those that are open, outermost first.

        For a post-mortem: the open ones say what each thread is in the middle of.
        """
        is_open = [span for stack in list(self._open.values()) for span in list(stack)]
        return [span.record() for span in (*list(self._recent), *is_open)]

    def enter(self, span: Span) -> None:
        """Note that a span began."""
        self._open.setdefault(span.thread, []).append(span)

    def leave(self, span: Span, now_ns: int) -> None:
        """Note that a span ended, and with it those inside that nobody ended (a broken loop)."""
        stack = self._open.get(span.thread, [])
        if span not in stack:  # it ended with the span around it
            return
        at = stack.index(span)
        for ended in reversed(stack[at:]):
            ended.end_ns = now_ns
            self._finished.append(ended)
            self._recent.append(ended)
            self._num_finished += 1
        del stack[at:]
        if not stack:
            del self._open[span.thread]


_process = SpanRecorder()
span = _process.span
each = _process.each
note = _process.note
note_host_memory = _process.note_host_memory
take = _process.take
recent = _process.recent
