"""The ``algorithm`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.limits import Epochs, NotNegative, Rows, Within


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    """Penalty for leaving the reference policy."""

    placement: Literal["none", "loss", "reward"]
    """``loss`` adds it to the policy loss; ``reward`` subtracts it from the reward of each
    response, with ppo token by token."""

    estimator: Literal["k1", "k2", "k3"]
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""

    coefficient: NotNegative
    """Weight of the penalty; above 0 if and only if it has a placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GAEConfig:
    """Generalized advantage estimation (arXiv:1506.02438). Read by ppo alone."""

    gamma: Annotated[float, Within(at_least=0.0, at_most=1.0)]
    """Discount per token. 1: a reward counts the same however long the response."""

    lam: Annotated[float, Within(at_least=0.0, at_most=1.0)]
    """1 trusts the sampled rewards (no bias, high variance), 0 the critic's next value."""

    whiten: bool
    """Shift and scale the advantages of a step to mean 0 and standard deviation 1 over tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """The objective. Mirrors hydra_configs/algorithm/*.yaml key by key."""

    name: Literal["grpo", "ppo"]
    """``grpo`` compares responses to the same prompt; ``ppo`` uses the critic's values instead."""

    divide_by_std: bool
    """With grpo: True is GRPO (arXiv:2402.03300), False Dr. GRPO (arXiv:2503.20783)."""

    clip_low: Annotated[float, Within(above=0.0, below=1.0, usual=0.2)]
    """Lower clip range of the probability ratio: ratio >= 1 - clip_low."""

    clip_high: Annotated[
        float, Within(above=0.0, at_most=1e6, usual=0.2, why="it clips nothing any more")
    ]
    """Upper clip range: ratio <= 1 + clip_high. Above clip_low it is clip-higher
    (arXiv:2503.14476)."""

    loss_aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_fixed_length",
    ]
    """How token losses become one number; see algorithms/aggregate.py."""

    entropy_coefficient: NotNegative
    """Weight of the entropy bonus."""

    num_epochs: Epochs
    """Passes over each rollout batch."""

    num_minibatches: Rows
    """Optimizer steps per pass; divides the rows of a step."""

    old_logprobs: Literal["recompute", "current"]
    """``recompute`` asks the training engine before the update. ``current`` uses the detached
    log-probs of the update's own forward pass: the same numbers with one pass less. It is legal
    only with one optimizer step per rollout."""

    sampler_ratio_cap: NotNegative
    """Cap of the importance weight between trainer and rollout engine (arXiv:2510.18855 style), at
    least 1; 0 is off. Both sides take log-probs at ``rollout.temperature``. The effect of
    ``rollout.top_p`` and ``rollout.top_k`` is not corrected."""

    kl: KLConfig
    """Penalty for leaving the reference policy."""

    gae: GAEConfig
    """How ppo turns rewards and values into advantages."""

    @property
    def num_updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_epochs * self.num_minibatches
