"""Targets of metrics besides the run folder. Their packages are imported on request."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hybridrl.config.trainer import TrackingConfig
from hybridrl.errors import TrackerError
from hybridrl.metrics import find_declaration
from hybridrl.network import host_and_port

log = logging.getLogger(__name__)


Settings = Mapping[str, object]
"""The run's configuration, for trackers that show it."""


class Tracker(Protocol):
    """Receives the metrics of a run: made at its start, closed at its end."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the finite metrics of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Drop, if possible, the steps after ``step``: they will be repeated."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


def start_tracker(name: str, folder: Path, config: TrackingConfig, settings: Settings) -> Tracker:
    """Start a tracker by its name in ``tracking.trackers``.

    Raises:
        TrackerError: its package or service refuses, for a reason of its own.
    """
    try:
        return TRACKERS[name](folder, config, settings)
    except Exception as error:  # of any kind: trackers are foreign packages
        if name not in _REMEDIES:
            raise
        raise TrackerError(
            f"tracking.trackers=[{name}]: {name} does not start the run: {error}; "
            f"{_REMEDIES[name]}, or leave {name} out"
        ) from error


def _kept_id(folder: Path, name: str) -> str:
    """Return the run's name at a service: made once, and kept in the run folder for a resume."""
    file = folder / f"{name}_id.txt"
    if not file.is_file():
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


class TensorBoardTracker:
    """Appends an event per step to a file in ``<run>/tensorboard``; OSError if the disk is full.

    Written without TensorBoard's own writer, which has threads, reports a full disk only at a later
    call, and imports TensorFlow if that is installed.
    """

    def __init__(self, folder: Path, config: TrackingConfig, settings: Settings) -> None:
        """Create the file. ``config`` and ``settings`` are not written to it."""
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


class _RunTracker:
    """A run object of a package, with ``log`` and ``finish``."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401  # of a package without types
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: the service keeps the first value of a step, or both."""

    def close(self) -> None:
        self._run.finish()


def _start_wandb(folder: Path, config: TrackingConfig, settings: Settings) -> Tracker:
    """Start a run of a project. ``WANDB_MODE=offline`` keeps it local."""
    wandb = import_module("wandb")
    run = wandb.init(
        project=config.project,
        name=folder.name,
        id=_kept_id(folder, "wandb"),
        resume="allow",
        dir=str(folder),
        config=dict(settings),
        # Its copy of the terminal would hold the frames of the live table.
        settings=wandb.Settings(console="off"),
    )
    return _RunTracker(run)


class _MlflowTracker(_RunTracker):
    """One run of an experiment, named like the run folder.

    ``MLFLOW_TRACKING_URI`` sets the store; without it MLflow makes ``mlflow.db`` in this folder.
    """

    def __init__(self, folder: Path, config: TrackingConfig, settings: Settings) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        id_file = folder / "mlflow_id.txt"  # MLflow chooses the id
        former = id_file.read_text(encoding="utf-8") if id_file.is_file() else None
        mlflow.set_experiment(config.project)
        super().__init__(mlflow.start_run(run_id=former, run_name=folder.name))
        id_file.write_text(self._run.info.run_id, encoding="utf-8")
        mlflow.log_dict(dict(settings), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()


def _start_trackio(folder: Path, config: TrackingConfig, settings: Settings) -> Tracker:
    """Start a run of a project, in a file below ``TRACKIO_DIR``, or at ``TRACKIO_SERVER_URL``."""
    run = import_module("trackio").init(
        project=config.project,
        # It knows runs by name alone, and folders of two runs may have the same.
        name=f"{folder.name}-{_kept_id(folder, 'trackio')}",
        resume="allow",
        config=dict(settings),
        embed=False,
        auto_log_gpu=False,  # the run measures these itself
        auto_log_cpu=False,
    )
    return _RunTracker(run)


def _start_swanlab(folder: Path, config: TrackingConfig, settings: Settings) -> Tracker:
    """Start a run of a project. ``SWANLAB_MODE=offline`` keeps it local."""
    swanlab = import_module("swanlab")
    run = swanlab.init(
        project=config.project,
        name=folder.name,
        id=_kept_id(folder, "swanlab"),
        resume="allow",
        log_dir=str(folder / "swanlab"),
        config=dict(settings),
        # A run asks nobody for a key, and its terminal would hold the frames of the live table.
        settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
    )
    return _RunTracker(run)


class _PrometheusTracker:
    """Serves the newest value of each metric, until the run ends.

    A gauge is ``hybridrl_`` and the metric's name, with ``_`` for what Prometheus does not allow in
    names. Its label ``metric`` has the name itself, and ``run`` the name of the run folder.
    """

    def __init__(self, folder: Path, config: TrackingConfig, settings: Settings) -> None:
        self._prometheus = prometheus = import_module("prometheus_client")
        self._run_name = folder.name
        # Of this run alone: the package's own registry would show those of other runs of a process.
        self._registry = prometheus.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        host, port = config.prometheus_host_and_port
        self._server, _ = prometheus.start_http_server(port, host, self._registry)
        place = host_and_port(host, self._server.server_port)
        log.info("Prometheus finds the metrics of this run at http://%s/metrics", place)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            declared = find_declaration(name)
            allowed = "hybridrl_" + re.sub(r"\W+", "_", name, flags=re.ASCII)
            if allowed not in self._gauges:
                help_text = f"{declared.meaning} ({declared.unit})" if declared else "last step"
                self._gauges[allowed] = self._prometheus.Gauge(
                    allowed, help_text, ["run", "metric"], registry=self._registry
                )
            self._gauges[allowed].labels(run=self._run_name, metric=name).set(value)

    def rewind(self, step: int) -> None:
        """Do nothing: a gauge has the newest value alone."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


TRACKERS: Mapping[str, Callable[[Path, TrackingConfig, Settings], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": _start_wandb,
    "mlflow": _MlflowTracker,
    "trackio": _start_trackio,
    "swanlab": _start_swanlab,
    "prometheus": _PrometheusTracker,
}
"""By name in ``tracking.trackers``; each continues what an earlier process of the run started."""

_REMEDIES = {
    "wandb": "type `wandb login`, set WANDB_MODE=offline in the environment",
    "mlflow": "set MLFLOW_TRACKING_URI=sqlite:////FOLDER/mlflow.db or that of a server in the "
    "environment",
    "trackio": "unset TRACKIO_SERVER_URL and TRACKIO_SPACE_ID, or correct them",
    "swanlab": "type `swanlab login`, set SWANLAB_MODE=offline in the environment",
    "prometheus": "set tracking.prometheus_address=127.0.0.1:0 for a free port",
}
"""Remedies of trackers that do not start. Errors of tensorboard are those of the run folder."""
