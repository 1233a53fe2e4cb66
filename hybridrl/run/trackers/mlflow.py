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
        """Start the run, or go on with the one that the folder had before."""
        mlflow.set_experiment(project)
        path = folder / "mlflow_id.txt"
        former = path.read_text(encoding="utf-8") if path.is_file() else None
        self._run = mlflow.start_run(run_id=former, run_name=folder.name)
        path.write_text(self._run.info.run_id, encoding="utf-8")
        mlflow.log_dict(dict(settings), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""
        mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow keeps both values of a step."""

    def close(self) -> None:
        """Finish the run."""
        mlflow.end_run()


open_tracker = MlflowTracker
