"""Weights & Biases. The only module that imports wandb."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

try:
    import wandb
except ImportError as err:
    raise ImportError(
        "tracking.trackers=[wandb] needs it installed: pip install 'hybridrl[wandb]', "
        "or set tracking.trackers=[tensorboard]"
    ) from err


class WandbTracker:
    """One run of a project, named like the run folder. ``WANDB_MODE=offline`` keeps it local."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Start the run."""
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=dict(settings)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


open_tracker = WandbTracker
