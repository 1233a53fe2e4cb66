"""The last lines of a run: its progress, results and folder, and the command to continue."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.run.display import format_duration, format_value
from hybridrl.run.line_files import SCORES, read_metrics

_NUM_SMOOTHED = 10
_OF_CONVERSATIONS: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    ("agent/turns/mean", max),
    ("agent/tool_error_fraction", min),
)


def describe_end(
    config: ExperimentConfig, *, command: Sequence[str], error: BaseException | None
) -> str:
    """Return some lines about a run that ended.

    Args:
        config: of the run, whose folder is there.
        command: that started it; empty if it was started by code.
        error: the reason for an early end; None is a finished run.
    """
    folder = Path(config.trainer.run_dir)
    lines = read_metrics(folder)
    num_done = int(lines[-1]["step"]) if lines else 0
    seconds = f", {format_duration(lines[-1]['elapsed_s'])}" if lines else ""
    verb = "finished" if error is None else "stopped"
    where = f"after step {num_done}" if num_done else "before step 1"
    epochs = config.trainer.num_epochs
    num_steps = config.num_steps if error or epochs is None else num_done  # epochs ended it
    rows = [(verb, f"{where} of {num_steps}{seconds}")]
    shown = (*SCORES, *_OF_CONVERSATIONS)
    rows += [(name, text) for name, best in shown if (text := _describe_score(lines, name, best))]
    store = CheckpointStore(folder / "checkpoints")
    steps = store.steps()
    places = {
        "model": folder / "hf",
        "adapter": folder / "adapter",
        "report": folder / "report.html",
        "checkpoint": store.folder_of(max(steps, default=0)),
    }
    rows += [(label, str(path)) for label, path in places.items() if path.exists()]
    if command and steps:  # without a checkpoint nothing is continued
        longer = [f"trainer.num_steps={2 * config.num_steps}"]
        longer += [] if epochs is None else [f"trainer.num_epochs={2 * epochs:g}"]
        more = [] if error else longer
        rows.append(("to continue", resume_command(command, run_dir=str(folder), changes=more)))
    return "".join(f"{label:<20} {text}\n" for label, text in rows)


def resume_command(command: Sequence[str], *, run_dir: str, changes: Sequence[str]) -> str:
    """Return the command that continues the run in ``run_dir``, quoted for a shell.

    Args:
        command: that started the run.
        changes: overrides that replace earlier ones.
    """
    given = (f"trainer.run_dir={run_dir}", *changes)
    replaced = {"trainer.overwrite", *(override.partition("=")[0] for override in given)}
    kept = [part for part in command if part.partition("=")[0] not in replaced]
    return shlex.join([*kept, *given])


def _describe_score(
    lines: Sequence[Mapping[str, float]], name: str, best_of: Callable[[Sequence[float]], float]
) -> str:
    """Return the first and last value of a metric; empty if it was not measured twice."""
    values = [(int(line["step"]), line[name]) for line in lines if name in line]
    if len(values) < 2:
        return ""
    if not name.startswith("eval/"):
        num = min(_NUM_SMOOTHED, len(values) // 2)
        first, last = (_mean(part) for part in (values[:num], values[-num:]))
        spans = f"means of {num} steps" if num > 1 else "first and last step"
        return f"{first} -> {last} ({spans})"
    best = best_of([value for _, value in values])
    step = next(step for step, value in values if value == best)
    first, last = format_value(values[0][1]), format_value(values[-1][1])
    return f"{first} -> {last}, best {format_value(best)} after step {step}"


def _mean(values: Sequence[tuple[int, float]]) -> str:
    return format_value(sum(value for _, value in values) / len(values))
