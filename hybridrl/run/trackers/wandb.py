"""Weights & Biases. The only module that imports wandb."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from hybridrl.errors import TrackerError

try:
    import wandb
except ImportError as err:
    raise ImportError(
        "tracking.trackers=[wandb] needs it installed: pip install 'hybridrl[wandb]', "
        "or set tracking.trackers=[tensorboard]"
    ) from err

_ID = "wandb_id.txt"


class WandbTracker:
    """One run of a project, named like the run folder. ``WANDB_MODE=offline`` keeps it local."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Start the run, or continue the earlier run of this folder.

        Raises:
            TrackerError: W&B refuses, for example for lack of a key.
        """
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=_run_id(folder),
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
        """Send one step."""
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: the server keeps the first value of a step."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """Return the id that earlier processes of this run folder used, or a new one."""
    path = folder / _ID
    if not path.is_file():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


open_tracker = WandbTracker
