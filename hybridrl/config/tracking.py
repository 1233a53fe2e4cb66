"""The ``tracking`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics go besides ``metrics.jsonl``. Mirrors hydra_configs/tracking/*.yaml."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...]
    """Trackers to write to; all but tensorboard are extras."""

    project: str
    """Project (wandb) or experiment (mlflow) name."""

    num_samples_per_step: CountOrZero
    """Responses written to samples.jsonl each step, with rewards and text."""

    trace: bool
    """Keep ``trace.json``, the activities of driver and ranks over time, for Perfetto."""

    live: Literal["auto", "table", "lines", "off"]
    """``auto`` shows a live table in a terminal, else plain lines."""
