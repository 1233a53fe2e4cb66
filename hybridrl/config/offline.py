"""The sections of modes that learn from rows of a data set: ``sft``, ``dpo``, ``reward_model``.

Steps, rows and measurements have the keys of all modes: ``trainer.num_steps``,
``trainer.num_prompts_per_step``, ``eval.every_num_steps``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hybridrl.config import parts
from hybridrl.config.limits import (
    Arguments,
    ArgumentValue,
    NotNegative,
    PreferenceBeta,
)
from hybridrl.config.parts import PartKind


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig:
    """Direct preference optimisation (``mode=dpo``). Mirrors hydra_configs/dpo/*.yaml."""

    loss: str
    """The loss of a pair, as sigmoid, ipo, hinge or simpo (see docs/how-to/dpo.md), or
    ``path/to/file.py:function``. One that reads log-ratios loads a reference."""

    beta: PreferenceBeta | None
    """Weight of a pair's log-ratios: small values let the policy leave the reference. Null: the
    loss's own, 0.1 for most."""

    loss_args: Arguments
    """Further numbers of the loss, as label_smoothing; those not given have its own defaults."""

    sft_coefficient: NotNegative
    """Weight of the negative log-likelihood of the chosen answer, the mean over its tokens, beside
    the loss (arXiv:2404.19733, eq. 1). 0 is none."""

    @property
    def parts(self) -> tuple[tuple[PartKind, str, Mapping[str, ArgumentValue]], ...]:
        """The loss as a part: kind, name, and the numbers that were given."""
        beta = {} if self.beta is None else {"beta": self.beta}
        return ((parts.PREFERENCE_LOSS, self.loss, {**beta, **self.loss_args}),)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-ratios to a reference."""
        names = ("chosen_logratios_P", "rejected_logratios_P")
        return any(parts.PREFERENCE_LOSS.reads(self.loss, name) for name in names)

    def with_absolute_files(self) -> DpoConfig:
        """Return the same section with an absolute path of the loss's file, if it has one."""
        return replace(self, loss=parts.absolute(self.loss))


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """Supervised fine-tuning (``mode=sft``). Mirrors hydra_configs/sft/*.yaml."""

    turns: Literal["last", "all"]
    """Turns of the assistant that are learned: the answer alone, or also those in chat prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """Training of a reward model. Mirrors hydra_configs/reward_model/*.yaml.

    ``mode=reward_model`` gives ``model.path`` a head of one number; ``actor`` says how all weights
    are trained.
    """

    center_coefficient: NotNegative
    """Weight of the squared sum of a pair's scores, which keeps scores near 0
    (arXiv:2312.09244, eq. 2). 0 is off; 0.01 is usual."""

    margin_key: str | None
    """Column of numbers: by how much the score of the chosen answer must be higher (Llama 2,
    arXiv:2307.09288, eq. 2). Null: 0."""
