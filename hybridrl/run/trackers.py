"""Targets of metrics besides the run folder. Their packages are imported on request."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hybridrl.errors import TrackerError

log = logging.getLogger(__name__)

MAX_FAILED = 3


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the finite metrics of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Drop, if possible, the steps after ``step``: they will be repeated."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


@dataclass(slots=True)
class TolerantTracker:
    """A tracker whose errors end no run. The log names the first and the last one."""

    name: str
    tracker: Tracker
    num_failed: int = 0

    def attempt(self, call: Callable[[Tracker], None]) -> None:
        """Call the tracker, and note an error."""
        try:
            call(self.tracker)
        except Exception as error:  # of any kind: trackers are foreign packages
            self.num_failed += 1
            if self.num_failed in (1, MAX_FAILED):
                log.warning(
                    "tracking.trackers=[%s] failed: %s: %s; the run continues; metrics.jsonl has "
                    "every step. This was failure %d; after %d the tracker gets no more",
                    *(self.name, type(error).__name__, error, self.num_failed, MAX_FAILED),
                )


def import_tracker(name: str) -> ModuleType:
    """Import a tracker's package."""
    try:
        return import_module(name)
    except ImportError as err:
        if name == "tensorboard":  # installed with hybridrl
            raise
        raise ImportError(
            f"tracking.trackers=[{name}] needs it installed: pip install 'hybridrl[{name}]', "
            "or set tracking.trackers=[tensorboard]"
        ) from err


class TensorBoardTracker:
    """Appends an event per step to a file in ``<run>/tensorboard``; OSError if the disk is full.

    Written without TensorBoard's own writer, which has threads, reports a full disk only at a later
    call, and imports TensorFlow if that is installed.
    """

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Create the file. ``project`` and ``settings`` are not written to it."""
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event, self._session_log = events.Event, events.SessionLog
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.record_writer")
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        # Unbuffered: an error is raised in the step that caused it, and a crash loses nothing.
        self._file = (folder / name).open("wb", buffering=0)
        self._records = writer.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event."""
        numbers = [
            self._summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        self._write(step=step, summary=self._summary(value=numbers))

    def rewind(self, step: int) -> None:
        """Write an event that makes readers drop events after ``step``, in earlier files too."""
        start = self._session_log(status=self._session_log.START)
        self._write(step=step + 1, session_log=start)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **content: Any) -> None:  # noqa: ANN401  # fields of a protocol buffer
        event = self._event(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())


class _WandbTracker:
    """One run of a project, named like the run folder. ``WANDB_MODE=offline`` keeps it local."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        wandb = import_tracker("wandb")
        id_file = folder / "wandb_id.txt"
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                # Its copy of the terminal would hold the frames of the live table.
                settings=wandb.Settings(console="off"),
            )
        except (wandb.Error, OSError) as error:  # lost connections, too
            raise TrackerError(
                f"tracking.trackers=[wandb]: W&B does not start the run: {error}; type "
                "`wandb login`, set WANDB_MODE=offline in the environment, or leave wandb out"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: the server keeps the first value of a step."""

    def close(self) -> None:
        self._run.finish()


class _MlflowTracker:
    """One run of an experiment, named like the run folder.

    ``MLFLOW_TRACKING_URI`` sets the store; without it MLflow makes ``mlflow.db`` in this folder.
    """

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        self._mlflow = mlflow = import_tracker("mlflow")
        id_file = folder / "mlflow_id.txt"
        former = id_file.read_text(encoding="utf-8") if id_file.is_file() else None
        try:
            mlflow.set_experiment(project)
            self._run = mlflow.start_run(run_id=former, run_name=folder.name)
            id_file.write_text(self._run.info.run_id, encoding="utf-8")
            mlflow.log_dict(dict(settings), "config.json")
        except (mlflow.exceptions.MlflowException, OSError) as error:  # lost connections, too
            raise TrackerError(
                f"tracking.trackers=[mlflow]: MLflow does not start the run: {error}; set "
                "MLFLOW_TRACKING_URI=sqlite:////FOLDER/mlflow.db or that of a server in the "
                "environment, or leave mlflow out"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow keeps both values of a step."""

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: Mapping[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": _WandbTracker,
    "mlflow": _MlflowTracker,
}
"""By their names in ``tracking.trackers``."""
