"""MLflow. The only module that imports mlflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridrl.errors import TrackerError

try:
    import mlflow
except ImportError as err:
    raise ImportError(
        "tracking.trackers=[mlflow] needs it installed: pip install 'hybridrl[mlflow]', "
        "or set tracking.trackers=[tensorboard]"
    ) from err

_ID = "mlflow_id.txt"


class MlflowTracker:
    """One run of an experiment, named like the run folder.

    ``MLFLOW_TRACKING_URI`` sets the store; without it MLflow makes ``mlflow.db`` in this folder.
    """

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Start the run, or continue the earlier run of this folder.

        Raises:
            TrackerError: MLflow refuses, for example a store in an outdated format.
        """
        path = folder / _ID
        former = path.read_text(encoding="utf-8") if path.is_file() else None
        try:
            mlflow.set_experiment(project)
            self._run = mlflow.start_run(run_id=former, run_name=folder.name)
            path.write_text(self._run.info.run_id, encoding="utf-8")
            mlflow.log_dict(dict(settings), "config.json")
        except (mlflow.exceptions.MlflowException, OSError) as error:  # lost connections, too
            raise TrackerError(
                f"tracking.trackers=[mlflow]: MLflow does not start the run: {error}; set "
                "MLFLOW_TRACKING_URI=sqlite:////FOLDER/mlflow.db or that of a server in the "
                "environment, or leave mlflow out"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""
        mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow keeps both values of a step."""

    def close(self) -> None:
        """Finish the run."""
        mlflow.end_run()


open_tracker = MlflowTracker
