"""``trace.json``: spans and counters as Perfetto and chrome://tracing read them.

Each process of a run appends events to a file of its own, ``RUN_DIR/trace/PROCESS.jsonl``, one a
line. `join_traces` joins them into the run's file at its end. At any other time
``python -m hybridrl.diagnostics.trace_file RUN_DIR`` does it, also for a running run.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any

from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

FOLDER = "trace"
NAME = "trace.json"
MAX_BYTES = 128 << 20
"""Limit for all processes together: a browser can still open it."""

_PARTS = {".jsonl-first": "trace-first.json", ".jsonl-previous": "trace-previous.json"}
_PARTS |= {".jsonl": NAME}
_TAIL_BYTES = 1 << 20
_FIRST_TRACK = 1000  # behind the numbers of threads
_MAX_LANES = 16

Event = dict[str, Any]


class ProcessTrace:
    """The events of one process, in a file that no other process writes.

    At ``max_bytes`` it is renamed and a new one begun; the first and the last two are kept, so that
    a run of weeks does not fill the disk. Where it cannot be written, ``OSError`` is raised.
    """

    def __init__(self, run_folder: Path, process: str, *, max_bytes: int = MAX_BYTES) -> None:
        """Begin the file, or append if another process of the same name was killed."""
        (run_folder / FOLDER).mkdir(exist_ok=True)
        self._path = run_folder / FOLDER / f"{process}.jsonl"
        self._process = process
        self._max_bytes = max_bytes
        self._open()

    def append(self, events: Iterable[Event]) -> None:
        """Write complete lines in one call, so a kill leaves at most the last incomplete."""
        lines = []
        for event in events:
            thread = event["tid"]
            if thread not in self._threads:
                self._threads.add(thread)
                lines.append(_line(_name("thread_name", _thread_name(thread)) | {"tid": thread}))
                if thread >= _FIRST_TRACK:  # a conversation's lanes belong together
                    order = {"ph": "M", "name": "thread_sort_index"}
                    lines.append(_line(order | {"tid": thread, "args": {"sort_index": thread}}))
            lines.append(_line(event))
        self._file.write(b"".join(lines))
        if self._file.tell() > self._max_bytes:
            self._file.close()
            first, previous, _ = (self._path.with_suffix(suffix) for suffix in _PARTS)
            self._path.replace(previous if first.exists() else first)
            self._open()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._threads: set[int] = set()
        self._file = FileIO(self._path, "a+")
        start = max(0, self._file.seek(0, SEEK_END) - _TAIL_BYTES)
        self._file.seek(start)
        self._file.truncate(start + self._file.read().rfind(b"\n") + 1)
        self._file.seek(0, SEEK_END)
        self._file.write(_line(_name("process_name", self._process)))


def join_traces(run_folder: Path) -> None:
    """Write ``trace.json``, and earlier files of a long run, from the files of the processes."""
    files = (run_folder / FOLDER).glob("*.jsonl")
    processes = sorted(files, key=lambda path: (not path.name.startswith("driver"), path.name))
    for suffix, name in _PARTS.items():
        paths = [path.with_suffix(suffix) for path in processes]
        if any(path.exists() for path in paths):
            try:
                _join(paths, run_folder / name)
            except OSError as error:
                log.warning("%s is not written: %s", name, error)


def _join(paths: Sequence[Path], target: Path) -> None:
    unfinished = target.with_suffix(".unfinished")
    with unfinished.open("wb") as joined:
        joined.write(b"[")
        separator = b"\n"
        for row, path in enumerate(paths, 1):
            for line in _complete_lines(path, row):
                joined.write(separator + b'{"pid":%d,' % row + line[1:-1])
                separator = b",\n"
        joined.write(b"\n]\n")
    unfinished.replace(target)


def _complete_lines(path: Path, row: int) -> Iterable[bytes]:
    if path.exists():
        yield _line({"ph": "M", "name": "process_sort_index", "args": {"sort_index": row}})
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def track_id(track: int, lane: int) -> int:
    """Return the number of the thread that shows a conversation's track, or a lane of it."""
    return _FIRST_TRACK + _MAX_LANES * track + lane % _MAX_LANES


def _thread_name(thread: int) -> str:
    if thread < _FIRST_TRACK:
        return "main" if thread == 1 else f"thread {thread}"
    track, lane = divmod(thread - _FIRST_TRACK, _MAX_LANES)
    return f"conversation {track}" + f", further call {lane}" * bool(lane)


def _name(kind: str, name: str) -> Event:
    return {"ph": "M", "name": kind, "args": {"name": name}}


def _line(event: Event) -> bytes:
    return to_json_text(event, separators=(",", ":")).encode() + b"\n"


if __name__ == "__main__":
    join_traces(Path(sys.argv[1]))
