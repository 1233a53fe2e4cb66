"""The files of a run folder, read once for rules, charts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import RunFolderError
from hybridrl.log import MANAGER, SERVER_LOGS
from hybridrl.report.history import History, parse_metrics, read_lines
from hybridrl.report.settings import Settings

_LOG_TAIL_BYTES = 64 << 10

EVALUATIONS = (("eval/reward/mean", max), ("eval/accuracy", max), ("eval/loss_nats", min))
"""Metrics of evaluations, and which value is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder, which may still grow."""

    folder: Path
    history: History
    settings: Settings
    log_lines: Sequence[str] = ()
    """The end of log.txt."""
    manager_lines: Sequence[str] = ()
    """The end of the rollout manager's log."""

    num_unreadable: int = 0
    """Complete lines of metrics.jsonl that are damaged."""

    @property
    def num_done(self) -> int:
        """Steps that were recorded."""
        return self.history.steps[-1] if self.history.steps else 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the complete run."""
        return int(self.settings.number("trainer.num_steps") or 0)

    @property
    def best_evaluation(self) -> tuple[float, int] | None:
        """The best held-out reward or accuracy, or the lowest held-out loss, and its step."""
        for name, choose in EVALUATIONS:
            series = self.history.get(name)
            if series.finite:
                best = choose(series.finite)
                return best, series.steps[series.values.index(best)]
        return None


def read_run(folder: Path) -> Run:
    """Read a run folder, also of a running run.

    Raises:
        RunFolderError: it is not a run folder.
    """
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise RunFolderError(
            f"{folder} is no run folder: it has no {' and no '.join(missing)}; "
            "name the folder that trainer.run_dir gave"
        )
    rows, num_unreadable = [], 0
    for line in read_lines(folder / "metrics.jsonl"):
        if (row := parse_metrics(line)) is not None:
            rows.append(row)
        elif line.endswith(b"\n"):  # else it is being written
            num_unreadable += 1
    return Run(
        folder=folder.resolve(),
        history=History(rows),
        num_unreadable=num_unreadable,
        settings=Settings.read(folder / "config.yaml"),
        log_lines=_read_log(folder / "log.txt"),
        manager_lines=_read_log(folder / SERVER_LOGS / f"{MANAGER}.txt"),
    )


def _read_log(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()
