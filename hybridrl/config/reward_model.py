"""The ``reward_model`` section."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.limits import Count, CountOrZero, NotNegative, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """Training of a reward model. Mirrors hydra_configs/reward_model/*.yaml.

    ``mode=reward_model`` gives ``model.path`` a head of one number; ``actor`` says how all weights
    are trained.
    """

    num_steps: Count
    """Optimizer steps."""

    batch_size: Rows
    """Pairs per step over all ranks."""

    center_coefficient: NotNegative
    """Weight of the squared sum of a pair's scores, which keeps scores near 0
    (arXiv:2312.09244, eq. 2). 0 is off; 0.01 is usual."""

    margin_key: str | None
    """Column of numbers: by how much the score of the chosen answer must be higher (Llama 2,
    arXiv:2307.09288, eq. 2). Null: 0."""

    eval_every_num_steps: CountOrZero
    """Steps between measurements on held-out pairs. 0: never."""
