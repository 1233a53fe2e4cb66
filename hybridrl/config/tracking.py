"""The ``tracking`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridrl.config import parts
from hybridrl.config.limits import ArgumentValue, CountOrZero


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics go besides ``metrics.jsonl``. Mirrors hydra_configs/tracking/*.yaml."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...]
    """Trackers to write to; all but tensorboard are extras."""

    project: str
    """Project (wandb) or experiment (mlflow) name."""

    function: str | None
    """``path/to/file.py:function``, called with ``step`` and ``metrics`` before the trackers. If it
    returns True, they do not get the step; ``metrics.jsonl`` has all. Null: none."""

    num_samples_per_step: CountOrZero
    """Responses written to samples.jsonl each step, with rewards and text."""

    trace: bool
    """Keep ``trace.json``, the activities of driver and ranks over time, for Perfetto."""

    live: Literal["auto", "table", "lines", "off"]
    """``auto`` shows a live table in a terminal, else plain lines."""

    @property
    def parts(self) -> tuple[tuple[parts.PartKind, str, Mapping[str, ArgumentValue]], ...]:
        """The function of metrics, if there is one: its kind, name and numbers."""
        return () if self.function is None else ((parts.METRICS_FUNCTION, self.function, {}),)
