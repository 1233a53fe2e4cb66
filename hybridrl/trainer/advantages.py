"""From rewards to advantages of tokens, on the driver. Legend: B rows, L tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridrl.algorithms.advantages.gae import AdvantageEstimate
from hybridrl.algorithms.kl import estimate_response_kl
from hybridrl.algorithms.load import Part
from hybridrl.batch import (
    LogprobBatch,
    RolloutBatch,
    jagged_from,
    place_on_last_tokens,
    response_lengths,
    row_lengths,
    spread_over_tokens,
)
from hybridrl.errors import TrainingError
from hybridrl.metrics import Mean, Metrics, merge
from hybridrl.rewards.report import mean_of
from hybridrl.trainer.batches import ScoredRollouts
from hybridrl.trainer.collect import Collected


@dataclass(frozen=True, slots=True)
class Targets:
    """The values that the updates of a step learn from."""

    advantages_BL: Tensor  # jagged float32, 0 outside the response
    returns_BL: Tensor | None  # jagged float32, targets of a critic's values; None without a critic
    charged: Metrics  # mean amounts that rewards were charged


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """Calls the advantage of the configuration with the inputs that it asks for."""

    part: Part
    # of the rows of a source, by its name; others go through `part`
    by_source: Mapping[str, Part] = field(default_factory=dict)
    # of the KL to the reference, which rewards are charged token by token; None charges none
    kl_estimator: Part | None = None
    # last tokens over which a long response pays up to 1; 0 pays none
    soft_overlong_tokens: int = 0
    max_response_tokens: int
    # rewards that an agent gave to its turns (`reward.function=agent`)
    agent_names: tuple[str, ...] = ()
    # numbers that advantages keep from step to step, by name; checkpoints have them
    state: dict[str, float] = field(default_factory=dict)

    def __call__(
        self,
        collected: Collected,
        logprobs: LogprobBatch,
        *,
        kl: float,
        values_BL: Tensor | None = None,
    ) -> Targets:
        """Return the targets of the policy, and of the critic if there is one.

        Statistics of groups and of the batch are of the rows that are learned from, as are charges;
        ``kl`` is the coefficient of the KL that rewards are charged.

        Raises:
            TrainingError: an input is missing, or the part's result is not one number per response
                or per token.
        """
        batch, is_kept_B = collected.batch, collected.is_kept_B
        greedy_B = collected.greedy_rewards_B
        shares = self._shares(batch, is_kept_B)
        if is_kept_B.all() and len(shares) == 1:
            return shares[0][0]._of(batch, logprobs, kl, values_BL, greedy_B)
        lengths_B = row_lengths(batch.rollouts.token_ids_BL)
        columns = (torch.zeros(int(lengths_B.sum())), torch.zeros(int(lengths_B.sum())))
        charged: list[Metrics] = []
        for own, is_own_B in shares:
            rows, is_own_T = is_own_B.nonzero()[:, 0], is_own_B.repeat_interleave(lengths_B)
            own_values_BL, own_greedy_B = None, None if greedy_B is None else greedy_B[rows]
            if values_BL is not None:
                own_values_BL = jagged_from(values_BL.values()[is_own_T], lengths_B[rows])
            given = (kl, own_values_BL, own_greedy_B)
            targets = own._of(batch.rows_at(rows), logprobs[rows.tolist()], *given)
            charged.append(targets.charged)
            for column_T, target_BL in zip(
                columns, (targets.advantages_BL, targets.returns_BL), strict=True
            ):
                if target_BL is not None:
                    column_T[is_own_T] = target_BL.values()
        advantages_BL, returns_BL = (jagged_from(column_T, lengths_B) for column_T in columns)
        return Targets(advantages_BL, None if values_BL is None else returns_BL, merge(charged))

    def _shares(self, batch: ScoredRollouts, is_kept_B: Tensor) -> list[tuple[Advantages, Tensor]]:
        """Return the kept rows of each advantage, bool [B]; those without rows are left out."""
        source_B = batch.source_B if self.by_source else ()
        is_other_B, shares = is_kept_B.clone(), []
        for source, part in self.by_source.items():
            is_own_B = torch.tensor([each == source for each in source_B]) & is_kept_B
            is_other_B &= ~is_own_B
            shares.append((replace(self, part=part), is_own_B))
        return [each for each in [(self, is_other_B), *shares] if each[1].any()]

    def _of(
        self,
        scored: ScoredRollouts,
        logprobs: LogprobBatch,
        kl: float,
        values_BL: Tensor | None,
        greedy_rewards_B: Tensor | None,
    ) -> Targets:
        rollouts, scores = scored.rollouts, scored.scores
        mask_BL = rollouts.response_mask_BL
        rewards_BL, rewards_B, metrics = self._charge(scored, logprobs, kl)
        charges_B = scores.rewards_B - rewards_B
        result = self.part(
            rewards_B=rewards_B,
            rewards_BL=rewards_BL,
            group_B=rollouts.prompt_index_B,
            response_mask_BL=mask_BL,
            token_ids_BL=rollouts.token_ids_BL,
            old_logprobs_BL=logprobs.old_logprobs_BL,
            reference_logprobs_BL=logprobs.reference_logprobs_BL,
            sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
            values_BL=values_BL,
            greedy_rewards_B=greedy_rewards_B,
            players_BL=_players(rollouts) if "players_BL" in self.part.inputs else None,
            source_B=scored.source_B if "source_B" in self.part.inputs else None,
            state=self.state,
            teacher_logprobs_BL=logprobs.teacher_logprobs_BL,
            squared_probs_BL=logprobs.squared_probs_BL,
            reward_parts_BK=scores.reward_parts_BK - charges_B[:, None],
            reward_weights_K=scores.reward_weights_K,
        )
        returns_BL = None
        if isinstance(result, AdvantageEstimate):
            returns_BL = result.returns_BL
            result = result.advantages_BL
        elif values_BL is not None:
            raise TrainingError(
                f"{self.part.key}={self.part.spelled} reads values_BL, so it must return an "
                "AdvantageEstimate: a critic learns from the returns"
            )
        advantages_BL = self._per_token(result, mask_BL)
        is_own = ":" in self.part.spelled
        if is_own and not advantages_BL.values()[mask_BL.values()].isfinite().all():
            raise TrainingError(
                f"{self.part.key}={self.part.spelled} returned numbers that are not finite; one "
                "cause is a division by the standard deviation of equal rewards"
            )
        return Targets(advantages_BL, returns_BL, metrics)

    def _charge(
        self, scored: ScoredRollouts, logprobs: LogprobBatch, kl: float
    ) -> tuple[Tensor | None, Tensor, Metrics]:
        """Return the rewards of tokens, if asked for, and of rows, charged; and mean charges."""
        mask_BL, rewards_B = scored.rollouts.response_mask_BL, scored.scores.rewards_B
        metrics: Metrics = {}
        penalty_B = torch.zeros_like(rewards_B)
        if self.soft_overlong_tokens:
            penalty_B = overlong_punishment(
                response_lengths(mask_BL),
                max_response_tokens=self.max_response_tokens,
                buffer_tokens=self.soft_overlong_tokens,
            )
            rewards_B = rewards_B + penalty_B
            metrics["reward/overlong_penalty/mean"] = mean_of(-penalty_B)
        rewards_BL = None
        if "rewards_BL" in self.part.inputs:
            rewards_BL = place_rewards(scored, -penalty_B, agent_names=self.agent_names)
        if self.kl_estimator is None:
            return rewards_BL, rewards_B, metrics
        old_BL, reference_BL = logprobs.old_logprobs_BL, logprobs.reference_logprobs_BL
        if old_BL is None or reference_BL is None:
            raise TrainingError(
                "algorithm.kl.placement=reward needs old and reference log-probs; "
                "set algorithm.old_logprobs=recompute"
            )
        kl_BL = estimate_response_kl(old_BL, reference_BL, mask_BL, estimator=self.kl_estimator)
        charge_T = kl * kl_BL.values()
        lengths_B = row_lengths(mask_BL)
        charge_B = torch.segment_reduce(charge_T, "sum", lengths=lengths_B, initial=0.0)
        metrics["reward/kl_charge/mean"] = mean_of(charge_B)
        num_tokens = max(int(mask_BL.values().sum()), 1)
        metrics["reward/kl_nats/mean"] = Mean(float(kl_BL.values().double().sum()), num_tokens)
        if rewards_BL is not None:
            rewards_BL = jagged_from(rewards_BL.values() - charge_T, lengths_B)
        return rewards_BL, rewards_B - charge_B, metrics

    def _per_token(self, result: object, mask_BL: Tensor) -> Tensor:
        """Return one advantage for each token, 0 outside the response."""
        shape = type(result).__name__
        if isinstance(result, Tensor):
            shape = str(list(result.shape))
            if not result.is_nested and result.shape == (len(mask_BL),):
                return spread_over_tokens(result, mask_BL)
            if result.is_nested and torch.equal(row_lengths(result), row_lengths(mask_BL)):
                return result
        raise TrainingError(
            f"{self.part.key}={self.part.spelled} returned {shape}; return one number for each of "
            f"{len(mask_BL)} responses, or a jagged tensor like response_mask_BL"
        )


def _players(rollouts: RolloutBatch) -> Tensor:
    if rollouts.players_BL is not None:
        return rollouts.players_BL
    lengths_B = row_lengths(rollouts.token_ids_BL)
    return jagged_from(torch.zeros(int(lengths_B.sum()), dtype=torch.int8), lengths_B)


def describe_values(returns_BL: Tensor, values_BL: Tensor, mask_BL: Tensor) -> Metrics:
    """Measure how well the critic predicted the returns of a step's response tokens."""
    mask_T = mask_BL.values()
    values_S = values_BL.values()[mask_T].double()
    returns_S = returns_BL.values()[mask_T].double()
    if not len(returns_S):
        return {}
    metrics: Metrics = {
        "critic/value/mean": Mean(float(values_S.sum()), len(values_S)),
        "critic/return/mean": Mean(float(returns_S.sum()), len(returns_S)),
    }
    variance = float(returns_S.var(correction=0))
    if variance > 0:
        missed = float((returns_S - values_S).var(correction=0))
        metrics["critic/explained_variance"] = Mean(1 - missed / variance)
    return metrics


def place_rewards(
    scored: ScoredRollouts, charges_B: Tensor, *, agent_names: tuple[str, ...]
) -> Tensor:
    """Return rewards by token, jagged float32 [B, L]; a row's sum is its reward less its charges.

    Those of ``agent_names`` stand where an agent gave them, all else at the last response token.
    """
    rollouts, scores = scored.rollouts, scored.scores
    mask_BL, agent_BL = rollouts.response_mask_BL, rollouts.agent_rewards_BL
    if agent_BL is None or not agent_names:
        return place_on_last_tokens(scores.rewards_B - charges_B, mask_BL)
    is_agent_K = torch.tensor([name in agent_names for name in scores.names])
    weights_K = scores.reward_weights_K.double()
    others_B = scores.reward_parts_BK.double() @ (weights_K * ~is_agent_K)
    at_end_BL = place_on_last_tokens(others_B.float() - charges_B, mask_BL)
    weights_B = (~scores.is_failed_BK).double() @ (weights_K * is_agent_K)
    weights_T = weights_B.float().repeat_interleave(row_lengths(mask_BL))
    return jagged_from(at_end_BL.values() + weights_T * agent_BL.values(), row_lengths(mask_BL))


def overlong_punishment(
    lengths_B: Tensor, *, max_response_tokens: int, buffer_tokens: int
) -> Tensor:
    """Return the punishment of long responses, to be added to their rewards before the advantages.

    DAPO (arXiv:2503.14476, eq. 13). It is 0 up to ``max_response_tokens - buffer_tokens``, falls
    linearly to -1 at ``max_response_tokens``, and is -1 beyond. The paper has 20,480 and 4,096.
    TRL's get_soft_overlong_punishment is the same. verl and OpenRLHF multiply by a factor: multiply
    the result. verl's falls below -1 beyond the limit, which no response reaches.

    Returns:
        float32 [B], from -1 to 0.
    """
    excess_B = lengths_B.double() - (max_response_tokens - buffer_tokens)
    return -(excess_B / buffer_tokens).clamp(0.0, 1.0).float()
