from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.gae import gae
from hybridrl.algorithms.kl import k1
from hybridrl.algorithms.load import Part
from hybridrl.batch import LogprobBatch, jagged
from hybridrl.errors import TrainingError
from hybridrl.rewards.scorer import Scores
from hybridrl.trainer.advantages import Advantages, Targets, describe_values
from hybridrl.trainer.batches import ScoredRollouts
from hybridrl.trainer.collect import Collected
from tests.trainer.rollouts import rollouts_of, scores_of

MASK_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, True])])
VALUES_BL = jagged([torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0.0, 1.0])])
NO_LOGPROBS = LogprobBatch(batch_size=[2])
OLD_BL = jagged([torch.tensor([9.0, 0.0, 1.0]), torch.tensor([9.0, -1.0])])
REFERENCE_BL = jagged([torch.zeros(3), torch.zeros(2)])
LOGPROBS = LogprobBatch(old_logprobs_BL=OLD_BL, reference_logprobs_BL=REFERENCE_BL, batch_size=[2])


def collected(scores: Scores | None = None, agent_rewards_BL: Tensor | None = None) -> Collected:
    rollouts = rollouts_of(
        [torch.arange(3), torch.arange(2)],
        MASK_BL.unbind(),
        [0, 0],
        sampler_logprobs_BL=VALUES_BL,
        is_truncated_B=torch.tensor([True, False]),
        agent_rewards_BL=agent_rewards_BL,
    )
    no_task: Any = None
    return Collected.of(ScoredRollouts(no_task, rollouts, scores or scores_of([1.0, 0.5])))


def targets_of(
    part: Part,
    logprobs: LogprobBatch = NO_LOGPROBS,
    *,
    kl: float = 0.0,
    values_BL: Tensor | None = None,
    given: Collected | None = None,
    **settings: Any,
) -> Targets:
    estimator = Part.of(k1) if kl else None
    advantages = Advantages(part=part, kl_estimator=estimator, max_response_tokens=2, **settings)
    return advantages(given or collected(), logprobs, kl=kl, values_BL=values_BL)


def rewards_of_rows(rewards_B: Tensor) -> Tensor:
    return rewards_B


def rewards_of_tokens(rewards_BL: Tensor) -> Tensor:
    return rewards_BL


def total(rewards_B: Tensor) -> Tensor:
    return rewards_B.sum()


def valued(values_BL: Tensor) -> Tensor:
    return values_BL


PLAIN_GAE = Part.of(gae, lam=1.0, whiten=False)


def test_a_reward_comes_at_the_end_and_values_are_subtracted() -> None:
    targets = targets_of(PLAIN_GAE, values_BL=VALUES_BL)
    assert targets.returns_BL is not None
    assert targets.advantages_BL.values().tolist() == [0.0, 0.75, 0.5, 0.0, -0.5]
    assert targets.returns_BL.values().tolist() == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_one_number_a_row_is_given_to_its_response_tokens() -> None:
    advantages_BL = targets_of(Part.of(rewards_of_rows)).advantages_BL
    assert advantages_BL.values().tolist() == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_kl_charge_falls_on_the_token_that_moved() -> None:
    targets = targets_of(Part.of(rewards_of_tokens), LOGPROBS, kl=0.5)
    # Half of (0, 1) and of -1, off a reward that comes with the last token.
    assert targets.advantages_BL.values().tolist() == [0.0, 0.0, 0.5, 0.0, 1.0]
    assert targets.charged["reward/kl_charge/mean"].value == 0.0
    assert targets.charged["reward/kl_nats/mean"].value == 0.0
    rows = targets_of(Part.of(rewards_of_rows), LOGPROBS, kl=0.5)
    assert rows.advantages_BL.values().tolist() == [0.0, 0.5, 0.5, 0.0, 1.0]


def test_a_response_near_the_limit_pays_before_it_is_compared() -> None:
    targets = targets_of(Part.of(rewards_of_rows), soft_overlong_tokens=2)
    # Of at most 2 tokens the last 2 cost 1/2 each.
    assert targets.advantages_BL.values().tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert targets.charged["reward/overlong_penalty/mean"].value == 0.75


def test_rewards_of_an_agent_stay_with_their_turns() -> None:
    # 0.25 and 0.5 of the agent, twice, and half of 3 and 5; the second row's agent failed.
    agent_rewards_BL = jagged([torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0.0, 9.0])])
    scores = Scores(
        ("right", "own"),
        torch.tensor([0.5, 2.0]),
        torch.tensor([[3.0, 0.75], [5.0, 0.0]]),
        torch.tensor([[False, False], [False, True]]),
    )
    for part, expected in (
        (rewards_of_tokens, [0.0, 0.5, 1.0 + 1.5 - 1.0, 0.0, 2.5 - 0.5]),
        (rewards_of_rows, [0.0, 2.0, 2.0, 0.0, 2.0]),
    ):
        targets = targets_of(
            Part.of(part),
            given=collected(scores, agent_rewards_BL),
            soft_overlong_tokens=2,
            agent_names=("own",),
        )
        assert targets.advantages_BL.values().tolist() == expected


def test_a_charge_without_log_probs_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"set algorithm\.old_logprobs=recompute"):
        targets_of(Part.of(rewards_of_rows), kl=0.5)


@pytest.mark.parametrize(
    ("part", "values_BL", "message"),
    [
        (Part.of(total), None, r"total returned \[\]; return one number for each of 2 responses"),
        (Part.of(valued), None, "valued reads values_BL, and there is none"),
        (Part.of(valued), VALUES_BL, "must return an AdvantageEstimate"),
    ],
)
def test_a_part_that_returns_no_advantages_is_named(
    part: Part, values_BL: Tensor | None, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        targets_of(part, values_BL=values_BL)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        *(((1.0, 2.0, 6.0), 1.0), ((5.0, 5.0, 5.0), 0.0), ((0.0, 1.0, 5.0), 1.0)),
        ((6.0, 5.0, 1.0), -3.0),
    ],
)
def test_explained_variance_of_perfect_constant_and_opposite_values(
    values: tuple[float, float, float], explained: float
) -> None:
    returns_BL = jagged([torch.tensor([99.0, 1.0, 2.0]), torch.tensor([99.0, 6.0])])
    values_BL = jagged([torch.tensor([0.0, *values[:2]]), torch.tensor([0.0, values[2]])])
    metrics = describe_values(returns_BL, values_BL, MASK_BL)
    assert metrics["critic/explained_variance"].value == pytest.approx(explained)
    assert metrics["critic/return/mean"].value == pytest.approx(3.0)


def test_equal_returns_have_no_variance_to_explain() -> None:
    returns_BL = jagged([torch.ones(3), torch.ones(2)])
    metrics = describe_values(returns_BL, VALUES_BL, MASK_BL)
    assert set(metrics) == {"critic/value/mean", "critic/return/mean"}
