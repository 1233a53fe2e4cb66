"""A record of this process's activity, in files that others read if it hangs or has died.

A rank that waits in C code, loops, or was killed answers no request. So each rank keeps a record in
three small files, and a report (``diagnostics/process_report.py``) needs only the files:

``STEM.activity``  the open `scope` blocks with their start times, and the texts of `gauge`
``STEM.memory``    the last 10 minutes, one sample a second: seconds, resident bytes, /dev/shm bytes
``STEM.stacks``    the stacks of all threads, written by a signal handler in C on request

Times are of ``time.monotonic``, which on Linux all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hybridrl.processes.guard import process_stat

STACKS_SIGNAL = signal.SIGUSR1
"""Signal on which a recorded rank writes its stacks. Send it to no other process: it kills."""

_to_json = json.JSONEncoder(allow_nan=False).encode  # kept: making an encoder costs 2 us

_MAX_TEXT = 240
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARED_MEMORY = Path("/dev/shm")  # where Ray keeps its object store on Linux


@dataclass(frozen=True, slots=True)
class RecordFiles:
    """The record of a process, and its start: a later process may have its number."""

    pid: int
    start_ticks: int
    """When the process started, in clock ticks since boot; 0 if /proc does not contain it."""
    stem: str
    """Path of the record's files without their suffix."""
    logs: tuple[str, ...]
    """Files behind its standard output and error; empty if these are not files."""


NO_RECORD = RecordFiles(pid=0, start_ticks=0, stem="", logs=())
"""The record of a process that keeps none."""


class _Activity:
    """The only record of this process; until `start` it is kept in memory alone."""

    def __init__(self) -> None:
        self._files: RecordFiles | None = None
        self._lock = threading.Lock()
        self._blocks: list[str] = []  # in JSON, encoded once: each call writes them twice
        self._start = ""
        self._last = "null"
        self._watched: dict[str, Callable[[], str]] = {}
        self._file = -1
        self._num_written = 0

    def start(self, folder: Path) -> RecordFiles:
        """Keep the record of this process in ``folder`` from now on. Twice is a no-op.

        It takes SIGUSR1, so it is for ranks, and not for processes that belong to other code.
        """
        if self._files is not None:
            return self._files
        pid = os.getpid()
        stem = folder / f"hybridrl-{pid}"
        # Files of an earlier process with this number: nobody reads them any more.
        for suffix in (".activity", ".memory", ".stacks"):
            stem.with_suffix(suffix).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(stem.with_suffix(".activity"), flags, 0o600)
        thread = threading.main_thread().ident
        self._start = f'"thread": {thread}, "oom_kills": {count_oom_kills()}'
        self._files = RecordFiles(pid, start_ticks(pid), str(stem), log_files())
        self._write()
        # Appending, so that a reader may empty the file between two dumps.
        stacks = os.open(stem.with_suffix(".stacks"), flags | os.O_APPEND, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        memory = os.open(stem.with_suffix(".memory"), flags, 0o600)
        threading.Thread(target=self._sample, args=(memory,), daemon=True).start()
        return self._files

    @contextmanager
    def scope(self, what: str, *, waits: bool = False) -> Iterator[None]:
        """Record ``what`` as the process's activity while the block lasts; blocks nest; 12 us.

        With ``waits`` the block only waits for other ranks, as a barrier does. It separates ranks
        that wait from the rank that they wait for.
        """
        block = _to_json([what[:_MAX_TEXT], time.monotonic(), waits])
        with self._lock:
            self._blocks.append(block)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._blocks.remove(block)  # not pop: coroutines leave in any order
                self._last = f"[{block}, {time.monotonic()}]"
                self._write()

    @contextmanager
    def gauge(self, name: str, describe: Callable[[], str]) -> Iterator[None]:
        """Let a thread record once a second the text of ``describe``: costs the caller nothing.

        It is called from another thread, so it reads plain numbers, and does not raise.
        """
        with self._lock:
            self._watched[name] = describe
        try:
            yield
        finally:
            with self._lock:
                self._watched.pop(name, None)

    def _write(self) -> None:
        """Write STEM.activity, in one system call."""
        if self._file < 0:
            return
        doing = ", ".join(self._blocks[-8:])
        notes = {name: describe()[:_MAX_TEXT] for name, describe in self._watched.items()}
        text = (
            f'{{{self._start}, "doing": [{doing}], "last": {self._last}, '
            f'"notes": {_to_json(notes) if notes else "{}"}}}'
        )
        # Blanks over the old text; a full 4 KiB each time would cost more than the recorded call.
        data = text.ljust(self._num_written).encode()
        self._num_written = len(text)
        # If the disk of the record fails, the recorded work continues.
        with suppress(OSError):
            os.pwrite(self._file, data, 0)

    def _sample(self, file: int) -> None:
        samples: deque[list[float]] = deque(maxlen=600)
        while True:
            shared_bytes = 0
            with suppress(OSError):
                usage = os.statvfs(_SHARED_MEMORY)
                shared_bytes = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            samples.append([round(time.monotonic(), 1), resident_bytes(), shared_bytes])
            with suppress(OSError):
                text = _to_json(list(samples)).ljust(os.fstat(file).st_size)
                os.pwrite(file, text.encode(), 0)
            with self._lock:
                if self._watched:
                    self._write()
            time.sleep(1.0)


_activity = _Activity()
start_recording = _activity.start
scope = _activity.scope
gauge = _activity.gauge


def start_ticks(pid: int) -> int:
    """Return when process ``pid`` started, in clock ticks since boot; 0 if unknown."""
    return int(process_stat(pid)[1][19])


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 if /proc does not contain it."""
    try:  # by system calls: a file object costs three times as much, and each call asks
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(statm, 128).split()[1]) * _PAGE_BYTES
    finally:
        os.close(statm)


def count_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory; 0 unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def log_files() -> tuple[str, ...]:
    """Return the files behind this process's standard output and error."""
    paths = []
    for descriptor in (1, 2):
        with suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_file():
                paths.append(str(path))
    return tuple(dict.fromkeys(paths))
