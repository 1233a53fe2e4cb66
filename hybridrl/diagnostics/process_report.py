"""Reports on the ranks of a group, whether they answer, hang or have died.

Sources: the files of `hybridrl.diagnostics.activity`, /proc, and Ray's logs of its workers. They
are read on the machine of the ranks: in the driver on its own machine, elsewhere by a Ray task.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.diagnostics import activity
from hybridrl.diagnostics.activity import RecordFiles
from hybridrl.processes.guard import process_stat

GONE = "gone"
UNREACHABLE = "unreachable"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted, mostly of a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": GONE,
    "X": GONE,
}
NO_MEMORY = "for want of memory"
_POLL_S = 0.05
_MAX_LINES = 8
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):\n((?:  .*\n?)*)",
    re.MULTILINE,
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3")
_COLLECTIVES = "/torch/distributed/"
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MonitoredRank:
    """A rank and the path of its process's record."""

    rank: int
    host: str
    node_id: str
    files: RecordFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The state of one rank at one moment."""

    rank: int
    host: str
    pid: int
    state: str
    """State of its process: running, sleeping, ..., gone, or unreachable with the reason."""
    doing: tuple[tuple[str, float], ...] = ()
    """Open blocks with their age in seconds, the outermost first; empty for an idle rank."""
    last: tuple[str, float] | None = None
    """The last block that ended, and seconds since."""
    waits: bool = False
    """Whether it waited for other ranks."""
    top: str = ""
    """The innermost frame of its main thread."""
    notes: Mapping[str, str] | None = None
    """Text of its `gauge`, for example the queues of its engine."""
    stacks: str = ""
    log_tail: str = ""
    """Last lines of its standard output and error."""
    memory: tuple[tuple[float, int, int], ...] = ()
    """(age in seconds, resident bytes, bytes in /dev/shm), the oldest first."""
    exit: str = ""
    """How its process ended, as far as known; empty while it lives."""

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self.state == GONE

    @property
    def where(self) -> str:
        """Its open blocks with ages, for example ``generate() for 3.2 s > sync for 0.1 s``."""
        if self.doing:
            return " > ".join(f"{what} for {age_s:.1f} s" for what, age_s in self.doing)
        return "idle" if self.last is None else f"idle, after {self.last[0]}"

    def describe(self) -> str:
        """Describe the rank's activity in one line."""
        state = f"{self.state}: {self.exit}" if self.exit else self.state
        who = f"rank {self.rank} ({self.host}, pid {self.pid}, {state})"
        verb = "waits for other ranks in " if self.waits else ""
        at = f", at {self.top}" if self.top else ""
        notes = "".join(f"; {name}: {text}" for name, text in (self.notes or {}).items())
        return f"{who}: {verb}{self.where}{at}{notes}"


def read_ranks(ranks: Sequence[MonitoredRank], *, wait_s: float) -> list[RankReport]:
    """Report on ranks of this machine; living ones get ``wait_s`` to write their stacks."""
    alive = [rank.files for rank in ranks if _is_alive(rank.files)]
    for files in alive:
        _ask_for_stacks(files)
    # Until each living rank has written something, then a moment longer.
    deadline, before = time.monotonic() + wait_s, list[int]()
    while time.monotonic() < deadline:
        sizes = [_size(f"{files.stem}.stacks") for files in alive if _is_alive(files)]
        if all(sizes) and sizes == before:
            break
        before = sizes
        time.sleep(_POLL_S)
    return [_read_rank(rank) for rank in ranks]


def _is_alive(files: RecordFiles) -> bool:
    _, stat = process_stat(files.pid)
    return stat[0] not in "ZX" and int(stat[19]) == files.start_ticks


def _ask_for_stacks(files: RecordFiles) -> None:
    with suppress(OSError):
        handle = os.pidfd_open(files.pid)
        try:
            # Again: from here on no other process can get the number and be killed by the signal.
            if _is_alive(files):
                os.truncate(f"{files.stem}.stacks", 0)
                signal.pidfd_send_signal(handle, activity.STACKS_SIGNAL)
        finally:
            os.close(handle)


def _read_rank(rank: MonitoredRank) -> RankReport:
    files = rank.files
    record = _read_json(f"{files.stem}.activity") or {}
    samples = _read_json(f"{files.stem}.memory") or []
    now = time.monotonic()
    state, is_alive = process_stat(files.pid)[1][0], _is_alive(files)
    stacks = _read_end(f"{files.stem}.stacks", 262_144) if is_alive else ""
    top, path = _innermost(stacks, record.get("thread"))
    log_tail = "".join(_read_log(log) for log in files.logs)
    doing = record.get("doing", [])
    last = record.get("last")
    return RankReport(
        rank=rank.rank,
        host=rank.host,
        pid=files.pid,
        state=_STATES.get(state, state) if is_alive else GONE,
        doing=tuple((what, now - since) for what, since, _ in doing),
        last=None if last is None else (last[0][0], now - last[1]),
        waits=is_alive and (_COLLECTIVES in path or bool(doing and doing[-1][2])),
        top=top,
        notes=record.get("notes"),
        stacks=stacks,
        log_tail=log_tail,
        memory=tuple((now - at_s, resident, shared) for at_s, resident, shared in samples),
        exit="" if is_alive else _guess_exit(log_tail, record.get("oom_kills", 0)),
    )


def _read_json(path: str) -> Any:  # noqa: ANN401 - what activity.py wrote
    try:
        return json.loads(_read_end(path, 1 << 16))
    except ValueError:  # it is missing, or is being written
        return None


def _guess_exit(log_tail: str, oom_kills_before: int) -> str:
    fatal = _FATAL.search(log_tail)
    if fatal:
        return fatal[1]
    killed = activity.count_oom_kills() - oom_kills_before
    if killed > 0:
        return f"the kernel killed {killed} processes here {NO_MEMORY} meanwhile"
    return "without a word, as after kill -9"


def _innermost(stacks: str, thread: int | None) -> tuple[str, str]:
    """Return a readable position of a thread, and the file of its innermost frame."""
    for number, frames in _THREAD.findall(stacks):
        if int(number, 16) == thread:
            frames_of_code = _FRAME.findall(frames)
            if not frames_of_code:
                return "", ""
            first = frames_of_code[0]
            own = [f for f in frames_of_code if not any(part in f[0] for part in _INSTALLED)]
            came_from = f" from {_frame(own[0])}" if own and own[0] is not first else ""
            return _frame(first) + came_from, first[0]
    return "", ""


def _frame(frame: tuple[str, str, str]) -> str:
    path, line, function = frame
    return f"{function} ({Path(path).name}:{line})"


def _read_log(path: str) -> str:
    lines = _read_end(path, 16_384).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_RAY_MARKS))


def _read_end(path: str, num_bytes: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, _size(path) - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def attach_reports(error: BaseException, reports: Sequence[RankReport]) -> None:
    """Store reports of ranks on ``error``, pickled or not; those of several groups add up."""
    vars(error)["rank_reports"] = (*reports_on(error), *reports)


def reports_on(error: BaseException | None) -> tuple[RankReport, ...]:
    """Return the reports of the ranks from the time when ``error``, or its cause, was raised."""
    reports: tuple[RankReport, ...] = ()
    while error is not None and not reports:
        reports = vars(error).get("rank_reports", ())
        error = error.__cause__ or error.__context__
    return reports


def failed_ranks_first(reports: Sequence[RankReport], late: Collection[int]) -> list[RankReport]:
    """Return the ranks that have not returned from a call, those at fault first.

    Dead ranks come first, then those that do not wait for others. If all wait, they wait at
    different positions, and the smaller group is at fault.
    """
    stuck = [report for report in reports if report.rank in late or report.is_gone]
    num_there = Counter(report.top for report in stuck)
    return sorted(
        stuck,
        key=lambda report: (not report.is_gone, report.waits, num_there[report.top], report.rank),
    )


def describe_ranks(failed_ranks: Sequence[RankReport]) -> str:
    """Return a line per rank, at most eight, for the end of an error message."""
    lines = [f"\n  {report.describe()}" for report in failed_ranks[:_MAX_LINES]]
    if len(failed_ranks) > _MAX_LINES:
        lines.append(f"\n  and {len(failed_ranks) - _MAX_LINES} more ranks")
    return "".join(lines)
