"""What a run leaves and shows: its folder, its trackers, its live view."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl import log
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Metrics
from hybridrl.report.page import try_report
from hybridrl.single_controller.spans import SpanHarvest
from hybridrl.trainer.live import LiveView, open_live
from hybridrl.trainer.tracing import Tracing
from hybridrl.trainer.tracking import RunLog, Sample

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The ``Recorder`` of a run."""

    run_log: RunLog
    live: LiveView
    tracing: Tracing | None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_log.folder

    def phase(self, name: str) -> None:
        """Say what begins."""
        self.live.phase(name)

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep and show the metrics of one step."""
        values = self.run_log.log_step(step, metrics)
        self.live.step(step, values)
        if self.tracing is not None:
            self.tracing.step(values)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some responses of a step."""
        self.run_log.log_samples(step, samples)

    def watching(self, ranks: SpanHarvest) -> AbstractContextManager[None]:
        """Trace these ranks until the end of the ``with``: ``record.watching(group.spans)``."""
        return nullcontext() if self.tracing is None else self.tracing.watching(ranks)


@contextmanager
def open_record(config: ExperimentConfig, *, resolved_yaml: str) -> Iterator[RunRecord]:
    """Make the run folder, begin the log and the live view, and end them all.

    Raises:
        RunFolderError: the folder exists or cannot be written.
    """
    run_log = RunLog(
        Path(config.trainer.run_dir),
        overwrite=config.trainer.overwrite,
        resolved_yaml=resolved_yaml,
        settings=asdict(config),
        config=config.tracking,
    )
    num_steps = config.sft.num_steps if config.mode == "sft" else config.trainer.num_steps
    with run_log:
        log.configure(file=run_log.log_file)
        try:
            with (
                _open_tracing(run_log.folder, is_on=config.tracking.trace) as tracing,
                open_live(config.tracking.live, num_steps=num_steps, stream=sys.stdout) as live,
            ):
                yield RunRecord(run_log, live, tracing)
        except BaseException:
            # To the file alone: whoever catches the error shows it.
            with run_log.log_file.open("a", encoding="utf-8") as file:
                file.write(f"the run ended with an error\n{traceback.format_exc()}")
            raise
        finally:
            try_report(run_log.folder)
            _logger.info("run folder: %s", run_log.folder)


@contextmanager
def _open_tracing(folder: Path, *, is_on: bool) -> Iterator[Tracing | None]:
    tracing = Tracing.begin(folder) if is_on else None
    with ExitStack() as ending:
        if tracing is not None:
            ending.callback(tracing.close)
        yield tracing


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """A ``Recorder`` for work before the run proper: shown as one phase, kept nowhere."""

    outer: RunRecord
    label: str
    num_steps: int

    def phase(self, name: str) -> None:
        """Say what begins."""
        self.outer.phase(f"{self.label}: {name}")

    def record(self, step: int, metrics: Metrics) -> None:
        """Show how far it is."""
        loss = metrics["loss/supervised_nats"].value
        self.outer.phase(f"{self.label}: step {step}/{self.num_steps}, loss {loss:.3f} nats")

    def watching(self, ranks: SpanHarvest) -> AbstractContextManager[None]:
        """Trace these ranks until the end of the ``with``."""
        return self.outer.watching(ranks)
