"""Everything that a run writes and shows: its folder, its trackers, its live view, its end."""

from __future__ import annotations

import logging
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from hybridrl import log
from hybridrl.checkpoint.store import CheckpointStore, RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.diagnostics import trace
from hybridrl.diagnostics.trace_file import join_traces
from hybridrl.metrics import Metrics
from hybridrl.report.page import try_machine, try_report
from hybridrl.report.run import SCORES, History, Series
from hybridrl.run.display import LiveView, format_duration, format_value, open_live
from hybridrl.run.postmortem import is_crash, write_postmortem
from hybridrl.run.run_folder import LOG, RunLogger, SampleRow, last_step, read_metrics
from hybridrl.trainer.interrupt import RunStopped

_logger = logging.getLogger(__name__)
_COUNTED = ("reward/mean", "eval/reward/mean", "policy/entropy_nats/mean")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The ``Recorder`` of a run."""

    run_log: RunLogger
    live: LiveView

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_log.folder

    def phase(self, name: str) -> None:
        """Show the phase that begins."""
        self.live.phase(name)

    def progress(self, text: str) -> None:
        """Show how far the phase is."""
        self.live.progress(text)

    def begin_step(self, step: int) -> None:
        """Show the step that begins."""
        self.live.begin_step(step)

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep and show the metrics of one step."""
        values = self.run_log.log_step(step, metrics)
        self.live.step(step, values)
        trace.count({name: value for name, value in values.items() if _is_counted(name)})

    def rewind(self, run: RunState | None) -> None:
        """Return to the state of a checkpoint; None is before the first step."""
        step = 0 if run is None else run.step
        if (last := last_step(self.folder)) > step:
            _logger.warning("steps %d to %d are done again; their lines go", step + 1, last)
        sizes, elapsed_s = ({}, 0.0) if run is None else (run.log_sizes, run.elapsed_s)
        self.run_log.rewind(step, sizes=sizes, elapsed_s=elapsed_s)
        self.live.rewind(step, read_metrics(self.folder))

    def samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Keep some responses of a step."""
        self.run_log.log_samples(step, samples)

    def explain(self, error: BaseException) -> None:
        """Note on ``error`` the position of the run, and write the post-mortem folder of a crash.

        Once for each error: by the code that survives it, or at the end of the run. Takes at most
        5 s and raises nothing, whatever the state of the disk.
        """
        where = self.live.describe_place()
        error.add_note(where)
        self.live.break_off()
        # A user who stops a start knows why; one who stops a step may have waited in vain.
        is_wanted = isinstance(error, KeyboardInterrupt) and not self.live.has_begun
        if is_crash(error) and not is_wanted:
            outcome = write_postmortem(self.folder, error, where=where)
            error.add_note(f"post-mortem: {outcome}")


@contextmanager
def open_record(
    config: ExperimentConfig,
    *,
    resolved_yaml: str,
    resumes: bool = False,
    command: Sequence[str] = (),
) -> Iterator[RunFolder]:
    """Make or open the run folder, begin the log and the live view, and end them all.

    With ``resumes`` the run in the folder continues. The last lines show how to continue with the
    ``command`` that started it.
    """
    run_log = RunLogger(
        Path(config.trainer.run_dir),
        overwrite=config.trainer.overwrite,
        resumes=resumes,
        resolved_yaml=resolved_yaml,
        settings=asdict(config),
        config=config.tracking,
    )
    with run_log:
        log.configure(file=run_log.folder / LOG)
        try_machine(run_log.folder)
        with (
            _summarized(config, command),
            _traced(run_log.folder),
            open_live(config.tracking.live, num_steps=config.num_steps, stream=sys.stdout) as live,
        ):
            record = RunFolder(run_log, live)
            if resumes:
                live.num_done = last_step(run_log.folder)
            try:
                yield record
            except RunStopped:  # on request, and after a log line: not an error
                raise
            except BaseException as error:
                record.explain(error)
                run_log.log_error(error)  # to the file alone: the catcher of the error shows it
                raise


@contextmanager
def _summarized(config: ExperimentConfig, command: Sequence[str]) -> Iterator[None]:
    """Make the report and show the summary, however the run ends."""
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        folder = Path(config.trainer.run_dir)
        _logger.info("run folder: %s", folder)
        if config.mode != "eval":  # which prints a table of its own
            try_report(folder)
            if config.tracking.live != "off":
                text = describe_end(config, command=command, error=ending)
                with suppress(BrokenPipeError):  # as after `| head`
                    sys.stdout.write(text)
                    sys.stdout.flush()


@contextmanager
def _traced(folder: Path) -> Iterator[None]:
    """Let this process, and ranks that it starts, write the trace of a run; join it at the end."""
    begins = trace.process.write_to(
        folder.absolute(), f"driver on {socket.gethostname()}", num_processes=4
    )
    try:
        if begins:
            join_traces(folder)  # after a driver was killed
        yield
    finally:
        trace.process.end()
        if begins:
            join_traces(folder)


def _is_counted(name: str) -> bool:
    return name in _COUNTED or name.partition("/")[0] in ("throughput", "memory")


_NUM_SMOOTHED = 10
_OF_CONVERSATIONS: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    ("agent/turns/mean", max),
    ("agent/tool_error_fraction", min),
)


def describe_end(
    config: ExperimentConfig, *, command: Sequence[str], error: BaseException | None
) -> str:
    """Return some lines about a run that ended; ``error`` is the reason for an early end."""
    folder = Path(config.trainer.run_dir)
    history = History(read_metrics(folder))
    num_done = history.steps[-1] if history.steps else 0
    seconds = f", {format_duration(history.elapsed_s[-1] or 0)}" if history.steps else ""
    verb = "finished" if error is None else "stopped"
    where = f"after step {num_done}" if num_done else "before step 1"
    epochs = config.trainer.num_epochs
    num_steps = config.num_steps if error or epochs is None else num_done  # epochs ended it
    rows = [(verb, f"{where} of {num_steps}{seconds}")]
    shown = (*SCORES, *_OF_CONVERSATIONS)
    rows += [
        (name, text)
        for name, best in shown
        if (text := _describe_score(history.get(name), name, best))
    ]
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
    """Return the ``command`` that continues its run, quoted; ``changes`` replace overrides."""
    given = (f"trainer.run_dir={run_dir}", *changes)
    replaced = {"trainer.overwrite", *(override.partition("=")[0] for override in given)}
    kept = [part for part in command if part.partition("=")[0] not in replaced]
    return shlex.join([*kept, *given])


def _describe_score(series: Series, name: str, best_of: Callable[[Sequence[float]], float]) -> str:
    """Return the first and last value of a metric; empty if it was not measured twice."""
    values = series.finite
    if len(values) < 2:
        return ""
    if not name.startswith("eval/"):
        num = min(_NUM_SMOOTHED, len(values) // 2)
        first, last = format_value(fmean(values[:num])), format_value(fmean(values[-num:]))
        spans = f"means of {num} steps" if num > 1 else "first and last step"
        return f"{first} -> {last} ({spans})"
    best, step = series.best(best_of)
    ends = f"{format_value(values[0])} -> {format_value(values[-1])}"
    return f"{ends}, best {format_value(best)} after step {step}"
