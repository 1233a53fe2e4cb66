"""Puts the page together: data, style, script and the chart library in one file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hybridrl import __version__
from hybridrl.atomic_io import atomic_write_text
from hybridrl.errors import RunFolderError
from hybridrl.json_text import to_json_text
from hybridrl.report.evidence import Evidence, Finding
from hybridrl.report.findings import find
from hybridrl.report.history import History
from hybridrl.report.panels import build_panels
from hybridrl.report.samples import read_samples
from hybridrl.report.settings import Settings, read_defaults
from hybridrl.report.timeline import read_timeline

NAME = "report.html"

log = logging.getLogger(__name__)

_ASSETS = files("hybridrl.report") / "assets"
_LOG_TAIL_BYTES = 64 << 10
_NUM_LOG_LINES = 60


def write_report(folder: Path, *, output: Path | None = None) -> Path:
    """Make the report of a run folder; the file appears whole or not at all.

    Args:
        folder: of a run, which may be going on.
        output: file to write; None is ``report.html`` in the folder.

    Returns:
        The file.

    Raises:
        RunFolderError: it is no run folder, or the file cannot be written.
    """
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise RunFolderError(
            f"{folder} is no run folder: it has no {' and no '.join(missing)}; "
            "name the folder that trainer.run_dir gave"
        )
    path = output or folder / NAME
    page = build_page(describe(folder))
    try:
        atomic_write_text(path, page, errors="replace")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error}; write elsewhere with --output"
        ) from error
    return path


def try_report(folder: Path) -> None:
    """Make the report at the end of a run. Failing to costs a warning, never what the run made."""
    try:
        log.info("report: %s", write_report(folder))
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        log.warning(
            "no report was made: %s: %s; try python -m hybridrl.report %s",
            *(type(error).__name__, error, folder),
        )


def describe(folder: Path) -> dict[str, Any]:
    """Return all that the page shows, as plain data."""
    history = History.read(folder / "metrics.jsonl")
    settings = Settings.read(folder / "config.yaml")
    log_lines = _read_log(folder / "log.txt")
    findings = find(Evidence(history, settings, log_lines))
    changes = settings.changes(read_defaults())
    return {
        "name": folder.resolve().name,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "status": _status(history, settings, findings),
        "tiles": _tiles(history),
        "findings": [asdict(finding) for finding in findings],
        "panels": build_panels(history, settings),
        "timeline": read_timeline(folder / "trace.json"),
        "samples": read_samples(folder / "samples.jsonl"),
        "settings": {
            "changes": [[key, _spell(old), _spell(new)] for key, (old, new) in changes.items()],
            "all": [[key, _spell(value)] for key, value in settings.flat.items()],
        },
        "log": log_lines[-_NUM_LOG_LINES:],
    }


def build_page(data: Mapping[str, Any]) -> str:
    """Fill the page. Texts of models reach it as data alone, in which no ``<`` stands."""
    as_json = to_json_text(data, keeps_unicode=True, separators=(",", ":"))
    texts = {name: (_ASSETS / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    return Template(texts["html"]).substitute(
        style=texts["css"],
        script=texts["js"],
        library=(files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8"),
        data=as_json.replace("<", "\\u003c"),
    )


def _status(
    history: History, settings: Settings, findings: list[Finding]
) -> dict[str, str | int | float | None]:
    key = "sft.num_steps" if settings.flat.get("mode") == "sft" else "trainer.num_steps"
    num_steps = int(settings.number(key) or 0)
    num_done = history.steps[-1] if history.steps else 0
    if any(finding.severity == "error" for finding in findings):
        word = "failed"
    elif num_steps and num_done >= num_steps:
        word = "finished"
    else:
        word = "unfinished"
    return {
        "word": word,
        "num_done": num_done,
        "num_steps": num_steps,
        "elapsed_s": history.elapsed_s[-1] if history.steps else None,
    }


_TILES = (
    ("Reward", "reward/mean"),
    ("Held-out reward", "eval/reward/mean"),
    ("Loss", "loss/supervised_nats"),
    ("Held-out loss", "eval/loss_nats"),
    ("Response length", "length/response_tokens/mean"),
    ("Step", "time/step_s"),
    ("Throughput", "throughput/tokens_per_s"),
)


def _tiles(history: History) -> list[dict[str, Any]]:
    """First and last values: means over five steps, since one step alone is noise."""
    units = {"time/step_s": "s", "throughput/tokens_per_s": "tokens/s"}
    tiles = []
    for label, name in _TILES:
        values = history.get(name).finite
        if values:
            few = 1 if name.startswith("eval/") else max(1, min(5, len(values) // 2))
            unit = units.get(name, "tokens" if "tokens" in name else "")
            ends = [sum(values[:few]) / few, sum(values[-few:]) / few]
            tiles.append({"label": label, "unit": unit, "first": ends[0], "last": ends[1]})
    return tiles


def _spell(value: object) -> str:
    """Write a value as it is typed on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _read_log(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()
