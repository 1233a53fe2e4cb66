"""A sweep: the runs of ``--multirun`` one after the other, and a table that compares them.

Each run is a process of its own: it may set threads and environment as it likes, and one that
dies, even from a signal, takes no other along. With ``cluster.ray_address`` all use that cluster;
without, each starts and ends its own Ray.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from hybridrl.atomic_io import atomic_write_text
from hybridrl.json_text import to_json_text
from hybridrl.run.scores import SCORES, read_metrics
from hybridrl.trainer.interrupt import SIGNALS
from hybridrl.trainer.interrupt import exit_status as exit_status_of

log = logging.getLogger(__name__)

_STOPPED = {exit_status_of(number): number for number in SIGNALS}

_MAX_NAME = 80
_MAX_ERROR = 300
_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Errors|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep."""

    number: int
    overrides: tuple[str, ...]
    """All that the run changes, as typed on a command line."""
    swept: tuple[str, ...]
    """Those of them that other runs of the sweep do not have."""
    folder: Path
    """Its run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """How one run ended. Mirrors an entry of sweep.json."""

    number: int
    swept: tuple[str, ...]
    folder: str
    status: Literal["done", "stopped", "failed"]
    exit_status: int
    """As subprocess counts: negative is the signal that ended it."""
    seconds: float
    score: str = ""
    """Name of the metric; empty if no step was taken."""
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    num_steps: int = 0
    error: str = ""


def build_jobs(overrides_of_jobs: Sequence[Sequence[str]], *, folder: Path) -> list[SweepJob]:
    """Name the run folders after what the runs do not share: ``0_lr=1e-4_seed=0``."""
    shared = set.intersection(*(set(overrides) for overrides in overrides_of_jobs))
    jobs = []
    for number, overrides in enumerate(overrides_of_jobs):
        swept = tuple(override for override in overrides if override not in shared)
        short = [override.lstrip("+~").rpartition("=") for override in swept]
        parts = [f"{key.rpartition('.')[2]}={value}" for key, _, value in short]
        name = re.sub(r"[^\w.=+-]+", "-", "_".join([str(number), *parts]))[:_MAX_NAME]
        jobs.append(
            SweepJob(number=number, overrides=tuple(overrides), swept=swept, folder=folder / name)
        )
    return jobs


def run_sweep(
    jobs: Sequence[SweepJob], *, folder: Path, command: Callable[[SweepJob], Sequence[str]]
) -> int:
    """Run every job, whatever becomes of the others, and write sweep.md and sweep.json.

    Both are written after each job, so that a sweep that is killed leaves what is known.
    Ctrl-C, SIGTERM and SIGHUP reach the job that runs, which ends after its step; no other is
    begun.

    Returns:
        The exit status: 0 if all are done, 1 if one failed, 128 + the number of the signal that
        stopped it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: list[SweepResult] = []
    stopping = _Stopping()
    before = {number: signal.signal(number, stopping) for number in SIGNALS}
    try:
        for job in jobs:
            sys.stdout.write(f"run {job.number + 1} of {len(jobs)}: {' '.join(job.swept)}\n")
            sys.stdout.flush()
            results.append(_run_job(job, command(job)))
            _write(results, folder=folder, num_jobs=len(jobs))
            if results[-1].status == "stopped":
                break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.stdout.write(describe(results, num_jobs=len(jobs)) + f"\nsweep folder: {folder}\n")
    if results[-1].status == "stopped":
        return exit_status_of(stopping.number)
    return int(any(result.status == "failed" for result in results))


class _Stopping:
    """Handles signals: remembers the last one, and interrupts the wait for the job."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.number = number
        raise KeyboardInterrupt


def describe(results: Sequence[SweepResult], *, num_jobs: int) -> str:
    """Return the table, best first, and a line on each run that is not done, as Markdown."""
    scores = sorted({result.score for result in results if result.score})
    score = " or ".join(scores) or "score"
    lines = [
        f"| run | overrides | {score}, last | best (step) | steps | seconds | status |",
        "|---|---|---|---|---|---|---|",
        *(_row(result) for result in sorted(results, key=_rank)),
        "",
    ]
    failed = [result for result in results if result.status == "failed"]
    if failed:
        lines.append(f"{len(failed)} of {num_jobs} runs failed:")
        lines += [f"- {r.number} ({' '.join(r.swept)}): {r.error}" for r in failed]
    if len(results) < num_jobs:
        lines.append(f"{num_jobs - len(results)} of {num_jobs} runs were not started")
    return "\n".join(lines).rstrip()


def _run_job(job: SweepJob, command: Sequence[str]) -> SweepResult:
    began_s = time.monotonic()
    was_stopped = False
    # In a process group of its own: Ctrl-C in the terminal comes here first and is handed on once.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as child:
        while (exit_status := child.poll()) is None:
            try:
                exit_status = child.wait()
                break
            except KeyboardInterrupt:
                was_stopped = True
                child.send_signal(signal.SIGINT)
    status: Literal["done", "stopped", "failed"] = "failed" if exit_status else "done"
    result = SweepResult(
        number=job.number,
        swept=job.swept,
        folder=str(job.folder),
        status="stopped" if was_stopped else status,
        exit_status=exit_status,
        seconds=round(time.monotonic() - began_s, 1),
        error=_find_error(job.folder, exit_status) if exit_status else "",
        **_find_score(job.folder),  # type: ignore[arg-type]
    )
    return result


def _find_score(folder: Path) -> Mapping[str, object]:
    steps = read_metrics(folder)
    for name, best_of in SCORES:
        values = {int(line["step"]): line[name] for line in steps if name in line}
        if values:
            best = best_of(list(values.values()))
            return {
                "score": name,
                "last": list(values.values())[-1],
                "best": best,
                "best_step": next(step for step, value in values.items() if value == best),
                "num_steps": int(steps[-1]["step"]),
            }
    return {}


def _find_error(folder: Path, exit_status: int) -> str:
    if exit_status < 0:
        return f"ended by {signal.Signals(-exit_status).name}"
    if exit_status in _STOPPED:
        return f"stopped by {_STOPPED[exit_status].name} before its last step"
    file = folder / "log.txt"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    errors = _ERROR_LINE.findall(text)
    words = errors[-1] if errors else f"exit status {exit_status}, see above"
    return words.removeprefix("hybridrl.errors.")[:_MAX_ERROR]


def _write(results: Sequence[SweepResult], *, folder: Path, num_jobs: int) -> None:
    entries = {"num_runs": num_jobs, "runs": [asdict(result) for result in results]}
    atomic_write_text(folder / "sweep.json", to_json_text(entries, indent=1) + "\n")
    atomic_write_text(folder / "sweep.md", describe(results, num_jobs=num_jobs) + "\n")


def _row(result: SweepResult) -> str:
    last = "" if result.last is None else f"{result.last:.4g}"
    best = "" if result.best is None else f"{result.best:.4g} ({result.best_step})"
    cells = (
        *(result.number, " ".join(result.swept), last, best),
        *(result.num_steps, f"{result.seconds:g}", result.status),
    )
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _rank(result: SweepResult) -> tuple[bool, float, int]:
    if result.last is None:
        return (True, 0.0, result.number)
    is_lower_better = dict(SCORES)[result.score] is min
    return (False, result.last if is_lower_better else -result.last, result.number)
