"""``trace.json``: spans and counters as Perfetto and chrome://tracing read them.

The JSON array of the Chrome trace-event format, one event a line. The format lets an array end
anywhere, so the file is written as the run goes and opens at any time, after a kill too.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from io import SEEK_END, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridrl.diagnostics.trace import SpanBatch, SpanRecord
from hybridrl.json_text import to_json_text

NAME = "trace.json"
FIRST_NAME = "trace-first.json"
PREVIOUS_NAME = "trace-previous.json"

_BEGIN = b"[\n"
_SEPARATOR = b",\n"
_TAIL_BYTES = 1 << 20
_Event = dict[str, Any]


class TraceFile:
    """Owns ``trace.json``; use it in a ``with``.

    A run of weeks must not fill the disk, nor outgrow what a browser opens: at ``max_bytes`` the
    file is set aside and a new one begun. The first and the last two are kept.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 128 << 20) -> None:
        """Begin the file, or go on where another process broke off.

        Args:
            folder: exists.
            max_bytes: size of one file; three may lie in the folder.

        Raises:
            OSError: it cannot be written.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._rows: dict[str, int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._file = self._open()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, process: str, harvest: SpanBatch) -> None:
        """Append what a process recorded, in a row of its own; rows keep the order they come in.

        Raises:
            OSError: the disk is full or gone.
        """
        row = self._rows.get(process) or len(self._rows) + 1
        events = [] if process in self._rows else _name_row(row, process)
        self._rows[process] = row
        for span in harvest.spans:
            thread = self._threads.get((row, span.thread))
            if thread is None:
                thread = 1 + sum(known_row == row for known_row, _ in self._threads)
                self._threads[row, span.thread] = thread
                events.append(_name_thread(row, thread))
            events.append(_complete(row, thread, span))
        at_us = harvest.at_ns // 1000
        if harvest.host_bytes:
            events.append(_counter(row, at_us, "host memory, MiB", harvest.host_bytes / 2**20))
        if harvest.num_dropped:
            what = f"{harvest.num_dropped} spans were dropped before they could be fetched"
            events.append({"ph": "i", "s": "p", "name": what, "pid": row, "tid": 1, "ts": at_us})
        self._append(events)

    def count(self, process: str, *, at_ns: int, values: Mapping[str, float]) -> None:
        """Append one point to each counter of a process that has a row.

        Args:
            process: as given to ``add`` before.
            at_ns: nanoseconds since 1970.
            values: by counter; what is not finite is left out.

        Raises:
            OSError: the disk is full or gone.
        """
        row, at_us = self._rows[process], at_ns // 1000
        self._append(
            _counter(row, at_us, name, value)
            for name, value in values.items()
            if math.isfinite(value)
        )

    def close(self) -> None:
        """End the array. Twice is a no-op."""
        if not self._file.closed:
            now_us = time.time_ns() // 1000
            end = {"ph": "i", "s": "g", "name": "the trace ends", "pid": 1, "tid": 1, "ts": now_us}
            try:
                self._file.write(_encode(end) + b"\n]\n")
            finally:
                self._file.close()

    def _append(self, events: Iterable[_Event]) -> None:
        """Write whole lines in one call, so that a kill leaves at most the last one torn."""
        data = b"".join(to_json_text(event).encode() + _SEPARATOR for event in events)
        if data:
            self._file.write(data)
        if self._file.tell() > self._max_bytes:
            self._set_aside()

    def _set_aside(self) -> None:
        self.close()
        is_first = not (self._folder / FIRST_NAME).exists()
        (self._folder / NAME).replace(self._folder / (FIRST_NAME if is_first else PREVIOUS_NAME))
        self._file = self._open()
        names = [event for name, row in self._rows.items() for event in _name_row(row, name)]
        self._append([*names, *(_name_thread(row, t) for (row, _), t in self._threads.items())])

    def _open(self) -> FileIO:
        file = FileIO(self._folder / NAME, "a+")
        size = file.seek(0, SEEK_END)
        if size == 0:
            file.write(_BEGIN)
            return file
        start = file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        # Behind the last whole event: what follows is torn, or the end of the array.
        file.truncate(start + tail.rfind(_SEPARATOR) + len(_SEPARATOR))
        file.seek(0, SEEK_END)
        return file


def _encode(event: _Event) -> bytes:
    return to_json_text(event, separators=(",", ":")).encode()


def _complete(row: int, thread: int, span: SpanRecord) -> _Event:
    # Both ends are rounded down, not the duration: what nests in nanoseconds nests here.
    begin_us = span.begin_ns // 1000
    return {
        "ph": "X",
        "name": span.name,
        "pid": row,
        "tid": thread,
        "ts": begin_us,
        "dur": (span.begin_ns + span.duration_ns) // 1000 - begin_us,
        **({"args": span.args} if span.args else {}),
    }


def _counter(row: int, at_us: int, name: str, value: float) -> _Event:
    return {"ph": "C", "name": name, "pid": row, "tid": 1, "ts": at_us, "args": {"value": value}}


def _name_row(row: int, name: str) -> list[_Event]:
    base = {"ph": "M", "pid": row, "tid": 1}
    return [
        base | {"name": "process_name", "args": {"name": name}},
        base | {"name": "process_sort_index", "args": {"sort_index": row}},
    ]


def _name_thread(row: int, thread: int) -> _Event:
    name = "main" if thread == 1 else f"thread {thread}"
    return {"ph": "M", "name": "thread_name", "pid": row, "tid": thread, "args": {"name": name}}
