"""Weights that rank 0 published for engines elsewhere: a folder of files, or a sender."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Protocol

from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import PhaseError
from hybridrl.models.dtypes import DTYPES
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.sharding.weight_files import WeightSource
from hybridrl.workers.sharding.weight_proof import WeightFolder
from hybridrl.workers.sharding.weight_sender import WeightBroadcaster


class PublishedWeights(Protocol):
    """The newest weights, for as many engines and as many tries as needed."""

    def begin(self) -> None:
        """Remove the weights before: others are about to be written."""
        ...

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write one bucket, staged by reference.

        Raises:
            EngineError: there is no room for it.
        """
        ...

    def source(self) -> WeightSource:
        """Return where engines get the weights.

        Raises:
            EngineError: the process that sends them did not start.
        """
        ...

    def break_off(self) -> None:
        """An update failed: free engines that still wait for weights. The weights stay."""
        ...

    def end_update(self) -> None:
        """The update has ended, with or without success. Idempotent."""
        ...

    def close(self) -> None:
        """Remove the weights. Idempotent."""
        ...


class PublishedFiles:
    """A folder in ``$TMPDIR``, for the time of an update. Servers link to files that they keep."""

    def __init__(self, config: RolloutConfig) -> None:
        """Make no folder yet."""
        self._dtype = DTYPES[config.dtype]
        self._folder: WeightFolder | None = None

    def begin(self) -> None:
        """Make a folder."""
        self.close()
        folder = Path(mkdtemp(prefix="hybridrl-weights-"))
        self._folder = WeightFolder(
            folder, dtype=self._dtype, if_full=", or serving.weights=broadcast"
        )

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write one file."""
        self._open_folder().write(staged, handles)

    def source(self) -> Path:
        """Return the folder."""
        return self._open_folder().folder

    def break_off(self) -> None:
        """Do nothing: no engine waits for another one."""

    def end_update(self) -> None:
        """Remove the folder."""
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder.folder, ignore_errors=True)
            self._folder = None

    def _open_folder(self) -> WeightFolder:
        if self._folder is None:
            raise PhaseError("no weights are being published: call begin")
        return self._folder


def publish_weights(route: WeightRoute, *, host: str, config: RolloutConfig) -> PublishedWeights:
    """Make the end of a route at rank 0.

    Args:
        route: ``serving.weights``.
        host: address of this process for all engines.
    """
    if route == "files":
        return PublishedFiles(config)
    return WeightBroadcaster(
        host=host, dtype=DTYPES[config.dtype], timeout_s=config.stage_timeout_s
    )
