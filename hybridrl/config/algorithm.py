"""The sections ``algorithm``, ``sft``, ``dpo`` and ``reward_model``: what is learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Annotated, Literal, get_args

from pydantic import Field

from hybridrl.config.functions import parts
from hybridrl.config.functions.parts import PartKind
from hybridrl.config.limits import (
    Arguments,
    ArgumentValue,
    Epochs,
    Name,
    NotNegative,
    PreferenceBeta,
    Rows,
    TokensOrZero,
)
from hybridrl.errors import suggest_name

Level = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]

_STATISTICS: dict[str, tuple[Level, Divergence]] = {
    f"{level}_{divergence}": (level, divergence)
    for level in get_args(Level)
    for divergence in get_args(Divergence)
    if (level, divergence) != ("seq_max", "k1")  # a ratio has no sign to take the largest of
}
_REJECTION_NUMBER = r"(\d*\.?\d+(?:e[+-]?\d+)?)"
_REJECTION = re.compile(rf"(?:{_REJECTION_NUMBER}\s*<=\s*)?(\w+)\s*<=\s*{_REJECTION_NUMBER}")

_ClipRange = Annotated[float, Field(gt=0.0, le=1e6, examples=[0.2])]


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    """Penalty for leaving the reference policy."""

    placement: Literal["none", "loss", "reward"]
    """``loss`` adds it to the policy loss; ``reward`` subtracts it from the rewards, token by
    token."""

    estimator: str
    """``k1``, ``k2``, ``k3`` (joschu.net/blog/kl-approx.html), ``absolute``, or FILE.py:NAME."""

    gradient: Literal["value", "k2", "ratio"]
    """Of a penalty in the loss. ``value`` differentiates the estimate. ``k2`` keeps its value and
    takes the gradient of k2, which is unbiased on-policy. ``ratio`` multiplies by the probability
    ratio of current and old policy, which with k3 is unbiased off-policy (arXiv:2512.02556)."""

    coefficient: NotNegative
    """Weight of the penalty; above 0 if and only if it has a placement."""

    target_nats: Annotated[float, Field(gt=0.0, le=1e6, examples=[0.1])] | None
    """Adapt the coefficient after each step, to hold the KL per token near this value
    (arXiv:1909.08593). Null: the coefficient is fixed."""


INITIAL, POLICY = "initial", "policy"
"""Teachers that are no folder: the policy as the run began, and as it is."""

SERVED = "serving.models."
"""Before the name of a served frozen model that teaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAdvantage:
    """The advantage of the rows of one source, instead of ``algorithm.advantage``."""

    advantage: str
    """How rewards of these rows become advantages."""

    advantage_args: Arguments = field(default_factory=dict)
    """Numbers of this advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """The objective. Mirrors hydra_configs/algorithm/*.yaml key by key.

    Parts are functions: each is named by its built-in name (see docs/algorithms.md), or by
    ``path/to/file.py:function``.
    """

    advantage: str
    """How rewards become advantages, as grpo, rloo or gae, which needs a critic."""

    advantage_args: Arguments
    """Numbers of the advantage; those not given have its own defaults."""

    by_source: Mapping[Name, SourceAdvantage]
    """Advantages for the rows of some sources, by the name of the source in ``data.sources``:
    ``algorithm.by_source.NAME.advantage=rloo``. Each sees the rows of its own sources alone."""

    policy_loss: str
    """The loss of each token, as ppo_clip, gspo or cispo."""

    policy_loss_args: Arguments
    """Numbers of the policy loss, except for its clip range."""

    clip_low: _ClipRange | None
    """Lower clip range of the policy loss; ppo_clip: ratio >= 1 - clip_low. Null: its own."""

    clip_high: _ClipRange | None
    """Upper clip range; ppo_clip: ratio <= 1 + clip_high. Above clip_low it is clip-higher
    (arXiv:2503.14476). Null: the policy loss's own."""

    token_mask: str | None
    """Leaves tokens out of the policy loss: off_policy_mask (arXiv:2512.02556), top_entropy_mask
    (arXiv:2506.01939). Null: none."""

    token_mask_args: Arguments
    """Numbers of the token mask."""

    loss_aggregation: str
    """How token losses become one number: token_mean, token_sum, sequence_mean_token_mean,
    sequence_mean_token_sum, sequence_mean_fixed_length, prompt_mean_token_mean."""

    entropy_coefficient: NotNegative
    """Weight of the entropy bonus."""

    num_epochs: Epochs
    """Passes over each rollout batch."""

    num_minibatches: Rows
    """Optimizer steps per pass; divides the rows of a step."""

    old_logprobs: Literal["recompute", "current", "sampler"]
    """``recompute`` asks the training engine before the update. ``current`` uses the detached
    log-probs of the update's own forward pass: the same numbers with one pass less. It is legal
    only with one optimizer step per rollout. ``sampler`` takes those of the rollout engine, so that
    the policy loss's ratio corrects for the sampler too (bypass mode)."""

    rollout_correction: str | None
    """Weights for tokens that trainer and rollout engine find unequally likely, as importance.
    Both take log-probs at ``rollout.temperature``. The effect of ``rollout.top_p`` and
    ``rollout.top_k`` is not corrected; see ``rollout.sampling_masks``. Null: none."""

    rollout_correction_args: Arguments
    """Numbers of the rollout correction."""

    group_filter: str | None
    """Which groups of responses to a prompt are learned from, as zero_variance. Null: all."""

    group_filter_args: Arguments
    """Numbers of the group filter."""

    row_filter: str | None
    """A function of yours, path/to/file.py:function: which responses, or tokens of them, are
    learned from. It returns bool [B], or a jagged bool [B, L]. Null: all."""

    max_sampling_rounds: Annotated[int, Field(ge=1, le=100)]
    """With a group filter: times that a step samples, to replace the groups that were left out
    (dynamic sampling, arXiv:2503.14476, 3.2). 1: they are not replaced."""

    soft_overlong_tokens: TokensOrZero
    """The reward falls, by up to 1, over the last tokens before ``rollout.max_response_tokens``
    (arXiv:2503.14476, eq. 13). 0: it does not."""

    mask_truncated: bool
    """Do not learn from responses that the length limit ended; their rewards still count for their
    group."""

    divergence_coefficient: NotNegative
    """Weight in the loss of the divergence of the policy's next-token distributions from a
    teacher's, at ``rollout.temperature``. 0: none. The advantage ``distillation`` compares the
    log-probs of sampled tokens instead."""

    divergence_beta: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.5])]
    """Of the generalised Jensen-Shannon divergence (arXiv:2306.13649, eq. 1): 0 is the forward KL,
    which covers all that the teacher says, 1 the reverse KL, which keeps to its likeliest, and 0.5
    the symmetric one."""

    divergence_top_k: Annotated[int, Field(ge=1, le=2**24, examples=[64])] | None
    """The teacher's likeliest tokens that are compared, all others together as one more. A rank
    holds 8 bytes for each, and for each token of its mini-batch, in host memory. Null: the full
    vocabulary, 4 bytes each."""

    teacher_path: str | None
    """Hugging Face folder of a teacher with the policy's vocabulary, for an advantage that reads
    its log-probs (distillation), or for the divergence. ``initial`` is the policy as the run began,
    ``policy`` as it is, which teaches if it reads ``teacher_prompt``, and ``serving.models.NAME`` a
    frozen model on rollout engines, asked about each response as it ends. Null: none."""

    teacher_paths: Mapping[str, str]
    """Teachers by source of the row (``data.source_key``), as ``{gsm8k: FOLDER}``; ``teacher_path``
    teaches rows of other sources, if there is one."""

    teacher_prompt: str | None
    """Text that teachers read in place of the prompt, of a chat in place of its last message, with
    ``{prompt}``, ``{answer}`` and further columns of the row in braces. So a teacher may know more
    than the policy, whose prompt stays the same. Null: the policy's prompt."""

    kl: KLConfig
    """Penalty for leaving the reference policy."""

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_epochs * self.num_minibatches

    @property
    def parts(self) -> tuple[tuple[PartKind, str, Mapping[str, ArgumentValue]], ...]:
        """The parts that this algorithm uses: kind, name, and the numbers that were given."""
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        given = {name: end for name, end in clip.items() if end is not None}
        named: list[tuple[PartKind, str | None, Mapping[str, ArgumentValue]]] = [
            (parts.ADVANTAGE, self.advantage, self.advantage_args),
            (parts.POLICY_LOSS, self.policy_loss, {**given, **self.policy_loss_args}),
            (parts.TOKEN_MASK, self.token_mask, self.token_mask_args),
            (parts.AGGREGATION, self.loss_aggregation, {}),
            (parts.KL, self.kl.estimator, {}),
            (parts.ROLLOUT_CORRECTION, self.rollout_correction, self.rollout_correction_args),
            (parts.GROUP_FILTER, self.group_filter, self.group_filter_args),
            (parts.ROW_FILTER, self.row_filter, {}),
        ]
        return tuple((kind, name, args) for kind, name, args in named if name is not None)

    @property
    def scores_rollouts(self) -> bool:
        """Whether ranks score the rollouts before the update: the policy, or a frozen model."""
        is_taught = self.reads("teacher_logprobs_BL") and not self.served_teachers
        has_frozen = self.kl.placement != "none" or is_taught
        return has_frozen or self.old_logprobs == "recompute"

    @property
    def parts_by_source(self) -> Mapping[str, tuple[PartKind, str, Mapping[str, ArgumentValue]]]:
        """The advantages of ``by_source``: kind with keys of its own, name and given numbers."""
        return {
            name: (
                replace(
                    parts.ADVANTAGE,
                    key=f"algorithm.by_source.{name}.advantage",
                    args_key=f"algorithm.by_source.{name}.advantage_args",
                ),
                own.advantage,
                own.advantage_args,
            )
            for name, own in self.by_source.items()
        }

    @property
    def teachers(self) -> Mapping[str, str]:
        """Folder of the teacher by source of the row; an empty one: of all others."""
        others = {} if self.teacher_path is None else {"": self.teacher_path}
        return {**self.teacher_paths, **others}

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Each teacher once: folders, `INITIAL` and `POLICY`, and served models behind `SERVED`."""
        return tuple(dict.fromkeys(self.teachers.values()))

    @property
    def served_teachers(self) -> tuple[str, ...]:
        """Each served model that teaches, once."""
        names = (name for name in self.teacher_names if name.startswith(SERVED))
        return tuple(name.removeprefix(SERVED) for name in names)

    @property
    def served_top_k(self) -> int | None:
        """Likeliest tokens that served teachers are asked for; None: there are none."""
        top_k = self.divergence_top_k if self.divergence_coefficient else 0
        return top_k if self.served_teachers else None

    @property
    def teacher_folders(self) -> tuple[str, ...]:
        """Each folder of a teacher once."""
        names = (name for name in self.teacher_names if name not in (INITIAL, POLICY))
        return tuple(name for name in names if not name.startswith(SERVED))

    @property
    def teacher_columns(self) -> tuple[str, ...]:
        """Columns of a row that the teacher's prompt names, besides prompt and answer."""
        names = (name for _, name, _, _ in Formatter().parse(self.teacher_prompt or "") if name)
        return tuple(dict.fromkeys(name for name in names if name not in ("prompt", "answer")))

    @property
    def has_teacher(self) -> bool:
        """Whether an advantage or the loss compares the policy with a teacher."""
        return self.divergence_coefficient > 0 or self.reads("teacher_logprobs_BL")

    def advantage_reads(self, *names: str) -> bool:
        """Return whether the advantage of any rows asks for one of these inputs."""
        used = {self.advantage, *(own.advantage for own in self.by_source.values())}
        return any(parts.ADVANTAGE.reads(part, name) for part in used for name in names)

    def needs_teacher(self, source: str) -> bool:
        """Return whether rows of a source are compared with a teacher."""
        own = self.by_source.get(source)
        part = self.advantage if own is None else own.advantage
        return self.divergence_coefficient > 0 or parts.ADVANTAGE.reads(part, "teacher_logprobs_BL")

    def reads(self, name: str) -> bool:
        """Return whether a part asks for the input ``name``."""
        used = (*self.parts, *self.parts_by_source.values())
        return any(kind.reads(part, name) for kind, part, _ in used)


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


@dataclass(frozen=True, slots=True)
class Rejection:
    """A bound that a token, or its response, must meet to be kept."""

    level: Level
    """A token alone, or a response for a number of all its tokens, which the bound rejects."""

    divergence: Divergence
    """Of trainer and sampler, as the KL estimators of these names."""

    low: float
    """Lower bound of exp(k1), above 0; 0 for k2 and k3, which have none."""

    high: float
    """Upper bound of exp(k1), or of the divergence, above 0."""


def read_rejections(text: str) -> tuple[Rejection, ...]:
    """Read rules that are separated by commas; none from an empty text.

    Bounds of k1 are those of ``exp(k1)``, the ratio of sampler over trainer; without a lower one it
    is the inverse of the upper one. Divergences k2 and k3 have an upper bound alone. Others are a
    ``ValueError``, of which the text says what to type.
    """
    return tuple(_read_rejection(rule.strip()) for rule in text.split(",") if rule.strip())


def _read_rejection(rule: str) -> Rejection:
    match = _REJECTION.fullmatch(rule)
    if match is None:
        raise ValueError(f"{rule!r} is no rule; write it as 0.5 <= token_k1 <= 2")
    low, name, high = match.groups()
    if name not in _STATISTICS:
        raise ValueError(f"{name!r} is no statistic; {suggest_name(name, list(_STATISTICS))}")
    level, divergence = _STATISTICS[name]
    if divergence != "k1":
        if low is not None:
            raise ValueError(f"{rule!r}: {name} has no lower bound; write {name} <= {high}")
        return Rejection(level, divergence, 0.0, float(high))
    upper = float(high)
    lower = float(low) if low is not None else 1 / upper if upper else 0.0
    if not 0.0 < lower <= upper:
        raise ValueError(f"{rule!r}: bounds are ratios above 0, the lower one first")
    return Rejection(level, divergence, lower, upper)
