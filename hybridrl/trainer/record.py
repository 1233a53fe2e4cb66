"""What a run leaves and shows: its folder, its trackers, its live view."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl import log
from hybridrl.checkpoint.manifest import RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Metrics
from hybridrl.trainer.live import LiveView, open_live
from hybridrl.trainer.loop import Recorder
from hybridrl.trainer.tracking import RunLog, Sample

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The ``Recorder`` of a run."""

    run_log: RunLog
    live: LiveView

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_log.folder

    def phase(self, name: str) -> None:
        """Say what begins."""
        self.live.phase(name)

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep and show the metrics of one step."""
        self.live.step(step, self.run_log.log_step(step, metrics))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file that grows by lines."""
        return self.run_log.sizes()

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken, over all its processes."""
        return self.run_log.elapsed_s

    def rewind(self, run: RunState | None) -> None:
        """Go back to where a checkpoint was taken; None is before the first step."""
        if run is None:
            self.run_log.rewind(0, sizes={}, elapsed_s=0.0)
        else:
            self.run_log.rewind(run.step, sizes=run.log_sizes, elapsed_s=run.elapsed_s)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some responses of a step."""
        self.run_log.log_samples(step, samples)


@contextmanager
def open_record(
    config: ExperimentConfig, *, resolved_yaml: str, resumes: bool = False
) -> Iterator[RunRecord]:
    """Make or open the run folder, begin the log and the live view, and end them all.

    Raises:
        RunFolderError: the folder exists and is not to be resumed, or cannot be written.
    """
    run_log = RunLog(
        Path(config.trainer.run_dir),
        overwrite=config.trainer.overwrite,
        resumes=resumes,
        resolved_yaml=resolved_yaml,
        settings=asdict(config),
        config=config.tracking,
    )
    num_steps = {"sft": config.sft.num_steps, "certify": 3}.get(
        config.mode, config.trainer.num_steps
    )
    with run_log:
        log.configure(file=run_log.log_file)
        try:
            with open_live(config.tracking.live, num_steps=num_steps, stream=sys.stdout) as live:
                yield RunRecord(run_log, live)
        except BaseException:
            # To the file alone: whoever catches the error shows it.
            with run_log.log_file.open("a", encoding="utf-8") as file:
                file.write(f"the run ended with an error\n{traceback.format_exc()}")
            raise
        finally:
            _logger.info("run folder: %s", run_log.folder)


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """A ``Recorder`` for work before the run proper: shown as one phase, kept nowhere."""

    outer: Recorder
    label: str
    num_steps: int

    def phase(self, name: str) -> None:
        """Say what begins."""
        self.outer.phase(f"{self.label}: {name}")

    def record(self, step: int, metrics: Metrics) -> None:
        """Show how far it is."""
        loss = metrics["loss/supervised_nats"].value
        self.outer.phase(f"{self.label}: step {step}/{self.num_steps}, loss {loss:.3f} nats")
