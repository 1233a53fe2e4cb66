"""A sweep: the runs of ``--multirun`` one after the other, and a page that compares them.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType

from hybridrl.errors import RunFolderError
from hybridrl.report.run import SCORES, History, read_run
from hybridrl.run.run_folder import read_metrics
from hybridrl.trainer.interrupt import SIGNALS, exit_status, handled_by

_REPORT = "hybridrl.report.__main__"  # it imports plotly, for which a command need not wait
_STOPPED = {exit_status(number): number for number in SIGNALS}
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


def build_jobs(overrides_of_jobs: Sequence[Sequence[str]], *, folder: Path) -> list[SweepJob]:
    """Name the run folders by the overrides that differ: ``0_lr=1e-4_seed=0``."""
    shared = set.intersection(*(set(overrides) for overrides in overrides_of_jobs))
    jobs = []
    for number, overrides in enumerate(overrides_of_jobs):
        swept = tuple(override for override in overrides if override not in shared)
        short = [override.lstrip("+~").rpartition("=") for override in swept]
        values = [f"{key.rpartition('.')[2]}={value}" for key, _, value in short]
        name = re.sub(r"[^\w.=+-]+", "-", "_".join([str(number), *values]))[:80]
        jobs.append(
            SweepJob(number=number, overrides=tuple(overrides), swept=swept, folder=folder / name)
        )
    return jobs


def run_sweep(
    jobs: Sequence[SweepJob], *, folder: Path, command: Callable[[SweepJob], Sequence[str]]
) -> int:
    """Run every job, even after a failure; then say how each ended, and compare them on a page.

    Ctrl-C, SIGTERM and SIGHUP reach the running job, which ends after its step; no other job
    starts. Returns the exit status: 0 if all are done, 1 if one failed, 128 + the number of the
    signal that stopped it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[str] = []
    has_failed, stopped_by = False, 0

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = number
        raise KeyboardInterrupt

    with handled_by(stop):
        for job in jobs:
            sys.stdout.write(f"run {job.number + 1} of {len(jobs)}: {' '.join(job.swept)}\n")
            sys.stdout.flush()
            status = _run_job(command(job))
            has_failed |= status != 0 and not stopped_by
            outcomes.append(_outcome(job, status, is_stopped=stopped_by > 0))
            if stopped_by:
                break
    sys.stdout.write("".join(f"{outcome}\n" for outcome in outcomes))
    if num_left := len(jobs) - len(outcomes):
        sys.stdout.write(f"{num_left} of {len(jobs)} runs were not started\n")
    _compare([job.folder for job in jobs], folder)
    if stopped_by or has_failed:
        setting = shlex.quote(f"hydra.sweep.dir={folder}")
        sys.stdout.write(f"to continue: the same command with {setting}\n")
    return exit_status(stopped_by) if stopped_by else int(has_failed)


def _run_job(command: Sequence[str]) -> int:
    """Return the exit status of a run."""
    # In a process group of its own: Ctrl-C reaches this process, which passes it on once.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as child:
        while (status := child.poll()) is None:
            try:
                status = child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
        return status


def _outcome(job: SweepJob, status: int, *, is_stopped: bool) -> str:
    """Say how a run ended, and its last score."""
    how = "stopped" if is_stopped else f"failed: {_find_error(job.folder, status)}"
    history = History(read_metrics(job.folder))
    score = next((name for name, _ in SCORES if history.get(name).finite), "")
    reached = ""
    if score:
        reached = f", {score} {history.get(score).finite[-1]:.4g} after step {history.steps[-1]}"
    name = f"{job.number} ({' '.join(job.swept)})"
    return f"{name}: {how if status or is_stopped else 'done'}{reached}"


def _compare(folders: Sequence[Path], sweep_folder: Path) -> None:
    """Write the page of ``python -m hybridrl.report`` about those runs that have begun."""
    report, runs = import_module(_REPORT), []
    for folder in folders:
        with suppress(RunFolderError):
            runs.append(read_run(folder))
    if runs:
        path = report.write_page(sweep_folder / report.COMPARISON, report.build_comparison(runs))
        sys.stdout.write(f"compared: {path}\n")


def _find_error(folder: Path, status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status in _STOPPED:
        return f"stopped by {_STOPPED[status].name} before its last step"
    file = folder / "log.txt"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines: list[str] = [f"exit status {status}, see above", *_ERROR_LINE.findall(text)]
    return lines[-1].removeprefix("hybridrl.errors.")[:300]
