"""The ``sft`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import Count, CountOrZero, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """Supervised fine-tuning (``mode=sft``). Mirrors hydra_configs/sft/*.yaml."""

    num_steps: Count
    """Optimizer steps."""

    batch_size: Rows
    """Rows per step over all ranks."""

    turns: Literal["last", "all"]
    """Turns of the assistant that are learned: the answer alone, or also those in chat prompts."""

    eval_every_num_steps: CountOrZero
    """Steps between losses on held-out rows. 0: never."""
