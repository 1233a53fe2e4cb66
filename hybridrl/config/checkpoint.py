"""The ``checkpoint`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Count, CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of a run. Mirrors hydra_configs/checkpoint/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Save every this many steps, after the last step, and when interrupted. 0: never."""

    keep_last: Count
    """Newest checkpoints to keep."""

    keep_best: CountOrZero
    """Further checkpoints to keep: the best by ``checkpoint.best_metric``."""

    best_metric: str | None
    """Metric of a step, by which its checkpoint is judged: ``eval/math/pass_at_8``. Null: the
    highest ``eval/reward/mean``; of preference pairs ``eval/accuracy``; for supervised fine-tuning
    the lowest ``eval/loss_nats``."""

    best_is: Literal["highest", "lowest"]
    """Which values of ``checkpoint.best_metric`` are good."""

    resume: Literal["auto", "never"]
    """``auto`` resumes from the newest complete checkpoint in ``trainer.run_dir``; ``never``
    refuses a folder that holds a run."""

    accept_changes: bool
    """Resume although recipe, data or tokenizer have changed, or lines of ``metrics.jsonl`` or
    ``samples.jsonl`` are lost; each change is logged."""

    max_restarts: CountOrZero
    """Consecutive restarts of lost workers without a new checkpoint in between."""
