"""What a run leaves and shows: its folder, its trackers, its live view."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hybridrl import log
from hybridrl.checkpoint.manifest import RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import error_notes
from hybridrl.metrics import Metrics
from hybridrl.report.facts import try_machine
from hybridrl.report.page import try_report
from hybridrl.run.display import LiveView, open_live
from hybridrl.run.final_summary import describe_end
from hybridrl.run.line_files import read_metrics
from hybridrl.run.postmortem import WHERE, PostMortem, Progress, is_crash
from hybridrl.run.run_folder import RunLogger, Sample
from hybridrl.run.tracing import Tracing
from hybridrl.single_controller import RankReport
from hybridrl.single_controller.spans import SpanCollector
from hybridrl.trainer.interrupt import RunStopped

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The ``Recorder`` of a run."""

    run_log: RunLogger
    live: LiveView
    tracing: Tracing | None
    progress: Progress
    ranks: list[RankReport] = field(default_factory=list)
    """Of the last failure, while it is not explained."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_log.folder

    def phase(self, name: str) -> None:
        """Say what begins."""
        self.progress.begin(name)
        self.live.phase(name)

    def begin_step(self, step: int) -> None:
        """Say which step begins."""
        self.progress.has_begun = True
        self.live.begin_step(step)

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep and show the metrics of one step."""
        values = self.run_log.log_step(step, metrics)
        self.live.step(step, values)
        self.progress.num_done = step
        if self.tracing is not None:
            self.tracing.step(values)

    def rewind(self, run: RunState | None) -> None:
        """Go back to where a checkpoint was taken; None is before the first step."""
        step = 0 if run is None else run.step
        if run is None:
            self.run_log.rewind(0, sizes={}, elapsed_s=0.0)
        else:
            self.run_log.rewind(step, sizes=run.log_sizes, elapsed_s=run.elapsed_s)
        self.progress.num_done = step
        self.live.rewind(step, read_metrics(self.folder))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some responses of a step."""
        self.run_log.log_samples(step, samples)

    def keep_reports(self, ranks: Sequence[RankReport]) -> None:
        """Keep what ranks did when one failed, for `explain`; the ``on_failure`` of groups."""
        seen = {(report.host, report.pid) for report in ranks}
        others = [report for report in self.ranks if (report.host, report.pid) not in seen]
        self.ranks[:] = [*others, *ranks]  # of another group: actor and critic apart

    def explain(self, error: BaseException) -> None:
        """Note on ``error`` where the run was, and write the post-mortem folder of a crash.

        Takes at most 5 s and raises nothing, whatever the state of the disk. Twice for one error is
        a no-op. Whoever goes on after an error calls it too.
        """
        if any(note.startswith(WHERE) for note in error_notes(error)):
            return
        error.add_note(self.progress.describe())
        self.live.break_off()
        # Somebody who stops a start knows why; who stops a step may have waited in vain.
        is_wanted = isinstance(error, KeyboardInterrupt) and not self.progress.has_begun
        if is_crash(error) and not is_wanted:
            outcome = PostMortem(self.folder, error, self.progress, tuple(self.ranks)).write()
            self.ranks.clear()
            error.add_note(f"post-mortem: {outcome}")

    def watching(self, ranks: SpanCollector) -> AbstractContextManager[None]:
        """Trace these ranks until the end of the ``with``: ``record.watching(group.spans)``."""
        return nullcontext() if self.tracing is None else self.tracing.watching(ranks)


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
        config: of the run.
        resolved_yaml: text of ``config.yaml``.
        resumes: the run in the folder goes on.
        command: that started the run; what is shown at the end says how to go on with it.

    Raises:
        RunFolderError: the folder exists and is not to be resumed, or cannot be written.
    """
    num_steps = 3 if config.mode == "certify" else config.num_steps
    with ExitStack() as opened:
        run_log = opened.enter_context(
            RunLogger(
                Path(config.trainer.run_dir),
                overwrite=config.trainer.overwrite,
                resumes=resumes,
                resolved_yaml=resolved_yaml,
                settings=asdict(config),
                config=config.tracking,
            )
        )
        log.configure(file=run_log.log_file)
        try_machine(run_log.folder)
        opened.enter_context(_summarized(config, command))
        tracing = Tracing.begin(run_log.folder) if config.tracking.trace else None
        if tracing is not None:
            opened.callback(tracing.close)
        live = opened.enter_context(
            open_live(config.tracking.live, num_steps=num_steps, stream=sys.stdout)
        )
        record = RunFolder(run_log, live, tracing, Progress(num_steps))
        try:
            yield record
        except RunStopped:  # on request, and after its log said so: no error
            raise
        except BaseException as error:
            record.explain(error)
            run_log.log_error(error)  # to the file alone: whoever catches the error shows it
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
        if config.mode != "certify":  # which trains in folders below this one
            try_report(folder)
            if config.tracking.live != "off":
                text = describe_end(config, command=command, error=ending)
                with suppress(BrokenPipeError):  # as after `| head`
                    sys.stdout.write(text)
                    sys.stdout.flush()
