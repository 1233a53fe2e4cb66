"""Everything that a run writes and shows: its folder, its trackers, its live view."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl import log
from hybridrl.checkpoint.store import RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.diagnostics import trace
from hybridrl.diagnostics.trace_file import join_traces
from hybridrl.metrics import Metrics
from hybridrl.report.facts import try_machine
from hybridrl.report.page import try_report
from hybridrl.run.display import LiveView, open_live
from hybridrl.run.final_summary import describe_end
from hybridrl.run.line_files import last_step, read_metrics
from hybridrl.run.postmortem import is_crash, write_postmortem
from hybridrl.run.run_folder import RunLogger, SampleRow
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

    Args:
        resumes: the run in the folder continues.
        command: that started the run; the last lines show how to continue with it.

    Raises:
        RunFolderError: the folder exists and is not to be resumed, or cannot be written.
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
        log.configure(file=run_log.log_file)
        try_machine(run_log.folder)
        with (
            _summarized(config, command),
            _traced(run_log.folder, is_on=config.tracking.trace),
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
def _traced(folder: Path, *, is_on: bool) -> Iterator[None]:
    """Let this process, and ranks that it starts, write the trace of a run; join it at the end."""
    begins = is_on and trace.process.write_to(
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
