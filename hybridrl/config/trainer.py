"""The ``trainer`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hybridrl.config.limits import Count, CountOrZero, Rows

_PASSES = "no run counts so far"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The driver's loop. Mirrors hydra_configs/trainer/*.yaml key by key."""

    num_steps: Count
    """Steps: one rollout batch and its updates each; one update each where nothing is sampled."""

    num_epochs: Annotated[float, Field(gt=0.0, le=1e6, examples=[1.0], description=_PASSES)] | None
    """End after this many passes over the rows, if that is before ``num_steps``. Null: the steps
    alone count."""

    num_prompts_per_step: Rows
    """Prompts P per step; P x rollout.num_responses_per_prompt responses are sampled. Modes that
    sample nothing: rows, or preference pairs, over all ranks."""

    max_staleness: Annotated[int, Field(ge=0, le=1000, description="rollouts are too old by then")]
    """Steps between the weights that sample a row's first token and the step that learns from it,
    at most. 0: a step samples, then learns. Above 0 engines on devices of their own sample ahead,
    while the trainer learns; needs ``serving.models`` and a rollout correction."""

    max_skipped_updates: CountOrZero
    """Consecutive updates that may be skipped for a non-finite loss or gradient before a stop."""

    run_dir: str
    """Folder of this run: configuration, log, metrics, samples."""

    overwrite: bool
    """Replace an existing run folder."""

    export_hf: bool
    """Write the final weights to ``<run_dir>/hf`` as a Hugging Face folder."""
