"""A sweep: the runs of ``--multirun`` one after the other, and a table that compares them.

Each run is a process of its own: it may set threads and environment as it likes. If one dies,
even from a signal, the others continue. With ``cluster.ray_address`` all use that cluster;
without, each starts and ends its own Ray.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from hybridrl.atomic_io import atomic_write_text
from hybridrl.json_text import to_json_text
from hybridrl.report.run import SCORES, History
from hybridrl.run.run_folder import read_metrics
from hybridrl.trainer.interrupt import SIGNALS, exit_status, handled_by

_STOPPED = {exit_status(number): number for number in SIGNALS}
_MAX_NAME = 80
_MAX_ERROR = 300
_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Errors|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep."""

    number: int
    overrides: tuple[str, ...]
    """All overrides of the run, as typed on a command line."""
    swept: tuple[str, ...]
    """Those of them that differ between the runs of the sweep."""
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """How one run ended. Mirrors an entry of sweep.json."""

    number: int
    swept: tuple[str, ...]
    folder: str
    status: Literal["done", "stopped", "failed"]
    exit_status: int
    """As subprocess counts: a negative one is the signal that ended it."""
    seconds: float
    score: str
    """Name of the metric; empty if no step was taken."""
    last: float | None
    best: float | None
    best_step: int | None
    num_steps: int
    error: str


def build_jobs(overrides_of_jobs: Sequence[Sequence[str]], *, folder: Path) -> list[SweepJob]:
    """Name the run folders by the overrides that differ: ``0_lr=1e-4_seed=0``."""
    shared = set.intersection(*(set(overrides) for overrides in overrides_of_jobs))
    jobs = []
    for number, overrides in enumerate(overrides_of_jobs):
        swept = tuple(override for override in overrides if override not in shared)
        short = [override.lstrip("+~").rpartition("=") for override in swept]
        values = [f"{key.rpartition('.')[2]}={value}" for key, _, value in short]
        name = re.sub(r"[^\w.=+-]+", "-", "_".join([str(number), *values]))[:_MAX_NAME]
        jobs.append(
            SweepJob(number=number, overrides=tuple(overrides), swept=swept, folder=folder / name)
        )
    return jobs


def run_sweep(
    jobs: Sequence[SweepJob], *, folder: Path, command: Callable[[SweepJob], Sequence[str]]
) -> int:
    """Run every job, even after a failure; after each write sweep.md and sweep.json.

    Ctrl-C, SIGTERM and SIGHUP reach the running job, which ends after its step; no other job
    starts. Returns the exit status: 0 if all are done, 1 if one failed, 128 + the number of the
    signal that stopped it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: list[SweepResult] = []
    stopped_by = 0

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = number
        raise KeyboardInterrupt

    with handled_by(stop):
        for job in jobs:
            sys.stdout.write(f"run {job.number + 1} of {len(jobs)}: {' '.join(job.swept)}\n")
            sys.stdout.flush()
            results.append(_run_job(job, command(job)))
            table = describe(results, num_jobs=len(jobs))
            entries = {"num_runs": len(jobs), "runs": [asdict(result) for result in results]}
            atomic_write_text(folder / "sweep.json", to_json_text(entries, indent=1) + "\n")
            atomic_write_text(folder / "sweep.md", table + "\n")
            if results[-1].status == "stopped":
                break
    sys.stdout.write(f"{table}\nsweep folder: {folder}\n")
    if len(results) < len(jobs) or any(result.status != "done" for result in results):
        setting = shlex.quote(f"hydra.sweep.dir={folder}")
        sys.stdout.write(f"to continue: the same command with {setting}\n")
    if results[-1].status == "stopped":
        return exit_status(stopped_by)
    return int(any(result.status == "failed" for result in results))


def _run_job(job: SweepJob, command: Sequence[str]) -> SweepResult:
    began_s = time.monotonic()
    was_stopped = False
    # In a process group of its own: Ctrl-C reaches this process, which passes it on once.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as child:
        while (status := child.poll()) is None:
            try:
                status = child.wait()
            except KeyboardInterrupt:
                was_stopped = True
                child.send_signal(signal.SIGINT)
    history = History(read_metrics(job.folder))
    scores = (name for name, _ in SCORES if history.get(name).finite)
    score = next(scores, "")
    series = history.get(score)
    best, best_step = series.best(dict(SCORES)[score]) if score else (None, None)
    return SweepResult(
        number=job.number,
        swept=job.swept,
        folder=str(job.folder),
        status="stopped" if was_stopped else "failed" if status else "done",
        exit_status=status,
        seconds=round(time.monotonic() - began_s, 1),
        score=score,
        last=series.finite[-1] if score else None,
        best=best,
        best_step=best_step,
        num_steps=history.steps[-1] if score else 0,
        error=_find_error(job.folder, status) if status else "",
    )


def _find_error(folder: Path, status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status in _STOPPED:
        return f"stopped by {_STOPPED[status].name} before its last step"
    file = folder / "log.txt"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines: list[str] = [f"exit status {status}, see above", *_ERROR_LINE.findall(text)]
    return lines[-1].removeprefix("hybridrl.errors.")[:_MAX_ERROR]


def describe(results: Sequence[SweepResult], *, num_jobs: int) -> str:
    """Return the table, best first, and a line on each unfinished run, as Markdown."""
    score = " or ".join(sorted({r.score for r in results if r.score})) or "score"
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
