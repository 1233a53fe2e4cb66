"""MLflow. The only module that imports mlflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

try:
    import mlflow
except ImportError as err:
    raise ImportError(
        "tracking.trackers=[mlflow] needs it installed: pip install 'hybridrl[mlflow]', "
        "or set tracking.trackers=[tensorboard]"
    ) from err


class MlflowTracker:
    """One run of an experiment, named like the run folder. ``MLFLOW_TRACKING_URI`` says where."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Start the run."""
        mlflow.set_experiment(project)
        self._run = mlflow.start_run(run_name=folder.name)
        mlflow.log_dict(dict(settings), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""
        mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        """Finish the run."""
        mlflow.end_run()


open_tracker = MlflowTracker
