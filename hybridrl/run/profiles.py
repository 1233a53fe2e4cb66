"""Steps of which each rank, and each of SGLang's servers, writes a profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from hybridrl.config.trainer import TrainerConfig
from hybridrl.metrics import Metrics

log = logging.getLogger(__name__)


class Profiled(Protocol):
    """A worker group of ``CheckpointedWorker``, or the rollout servers."""

    def profile(self, stem: Path | None) -> object:
        """Profile from here on, a file that begins with ``stem`` each process; None: write them."""
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
            group.profile(folder / f"step-{step}")
        metrics = take_step(step)
        for group in groups:
            group.profile(None)
        log.info("profile of step %d, for https://ui.perfetto.dev: %s", step, folder)
        return metrics

    return profiled
