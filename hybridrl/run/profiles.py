"""Steps of which each rank writes a profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from hybridrl.config.trainer import TrainerConfig
from hybridrl.metrics import Metrics

log = logging.getLogger(__name__)


class Profiled(Protocol):
    """A worker group of ``CheckpointedWorker``."""

    def begin_profile(self) -> list[None]:
        """Profile all calls from here on."""
        ...

    def end_profile(self, folder: Path, step: int) -> list[None]:
        """Write a file for each process."""
        ...


def with_profiles(
    take_step: Callable[[int], Metrics], groups: Collection[Profiled], trainer: TrainerConfig
) -> Callable[[int], Metrics]:
    """Return ``take_step`` that profiles the steps of ``trainer.profile_steps``."""
    folder = Path(trainer.run_dir).absolute() / "profile"  # ranks have a folder of their own

    def profiled(step: int) -> Metrics:
        if step not in trainer.profile_steps:
            return take_step(step)
        for group in groups:
            group.begin_profile()
        metrics = take_step(step)
        for group in groups:
            group.end_profile(folder, step)
        log.info("profile of step %d, for https://ui.perfetto.dev: %s", step, folder)
        return metrics

    return profiled
