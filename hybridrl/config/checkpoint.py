"""The ``checkpoint`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Count, CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What a run keeps to be resumed from. Mirrors hydra_configs/checkpoint/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Save after every so many steps, after the last, and when interrupted. 0 is never."""

    keep_last: Count
    """Newest checkpoints to keep."""

    keep_best: CountOrZero
    """Checkpoints with the highest ``eval/reward/mean`` to keep besides; for supervised
    fine-tuning the lowest ``eval/loss_nats``."""

    resume: Literal["auto", "never"]
    """``auto`` goes on where the newest whole checkpoint in ``trainer.run_dir`` was taken;
    ``never`` refuses a folder that holds a run."""

    accept_changes: bool
    """Resume although recipe, data or tokenizer have changed since, or lines of
    ``metrics.jsonl`` or ``samples.jsonl`` are lost; each change is logged."""

    max_restarts: CountOrZero
    """Times in a row, without a new checkpoint between, that lost workers are started again."""
