"""Sampling for a step: a small policy whose responses and rewards follow from the prompt alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.load import Part
from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import DrawnBatches, ScoredRollouts
from hybridrl.trainer.collect import Collected, Collector
from hybridrl.trainer.step_metrics import Clock
from tests.trainer.rollouts import ScoredAfterwards, rollouts_of, scores_of, source_of_rows

NUM_PROMPTS, NUM_RESPONSES = 3, 2
SAMPLING = SamplingParams(
    num_responses_per_prompt=NUM_RESPONSES,
    max_response_tokens=4,
    temperature=1.0,
    stop_token_ids=(0,),
)


@dataclass
class CountingPolicy:
    """Answers prompt n with n tokens, and records how it was asked."""

    asked: list[tuple[int, int, float]] = field(default_factory=list)

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        group = sampling.num_responses_per_prompt
        self.asked.append((len(prompts), group, sampling.temperature))
        index_B = prompts.prompt_index_P.repeat_interleave(group)
        lengths = [int(index) + 2 for index in index_B]
        masks = [torch.arange(length) > 0 for length in lengths]
        return rollouts_of([torch.arange(length) for length in lengths], masks, index_B)


@dataclass(frozen=True)
class ListedReward(ScoredAfterwards):
    """The first response to prompt n earns 1; the others too, unless n is in the list."""

    varied: frozenset[int]

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        group = len(rollouts) // len(task.rows)
        is_first_B = torch.arange(len(rollouts)) % group == 0
        is_varied_B = torch.tensor([int(n) in self.varied for n in rollouts.prompt_index_B])
        return scores_of((is_first_B | ~is_varied_B).float())


def differs(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Keep the groups with more than one reward."""
    groups = [rewards_B[group_B == group] for group in group_B.tolist()]
    return torch.tensor([len(rewards.unique()) > 1 for rewards in groups])


DIFFERS = Part.of(differs)


def collect(
    varied: frozenset[int], **settings: Any
) -> tuple[Collected, CountingPolicy, PromptSource]:
    source = source_of_rows(40, num_prompts=NUM_PROMPTS, shuffle=False)
    policy, reward = CountingPolicy(), ListedReward(varied)
    collector = Collector(
        batches=DrawnBatches(
            draw=source.next, engines=policy, while_sampling=reward.while_sampling
        ),
        policy=policy,
        sampling=SAMPLING,
        reward=reward,
        **settings,
    )
    return collector(Clock()), policy, source


def prompts_of(scored: ScoredRollouts) -> list[int]:
    return scored.rollouts.prompt_index_B[:: scored.num_responses].tolist()


def values(collected: Collected) -> dict[str, float]:
    return {name: metric.value for name, metric in collected.metrics.items()}


def test_without_a_filter_all_responses_are_learned_from() -> None:
    collected, _, source = collect(frozenset())
    assert collected.batch is collected.everything
    assert collected.is_kept_B.all()
    assert source.num_drawn == NUM_PROMPTS


def test_groups_without_signal_are_replaced_by_further_prompts() -> None:
    collected, policy, source = collect(frozenset({1, 4, 6, 8}), group_filter=DIFFERS, max_rounds=5)
    assert prompts_of(collected.everything) == list(range(9))
    assert prompts_of(collected.batch) == [1, 4, 6]
    assert collected.is_kept_B.all()
    assert policy.asked == [(3, 2, 1.0)] * 3
    assert source.num_drawn == 9
    assert values(collected) == {
        "groups/sampled": 9,
        "groups/kept_fraction": 4 / 9,
        "groups/learned": 3,
        "groups/surplus": 1,
    }


def test_sampling_ends_after_the_last_round() -> None:
    collected, policy, _ = collect(frozenset({4}), group_filter=DIFFERS, max_rounds=2)
    assert len(policy.asked) == 2
    assert prompts_of(collected.batch) == [0, 1, 4]  # as many as a step has
    assert collected.is_kept_B.tolist() == [False] * 4 + [True] * 2
    assert values(collected)["groups/learned"] == 1


def test_rows_tokens_and_rewards_of_a_prompt_stay_together() -> None:
    collected, _, _ = collect(frozenset({2, 3, 7}), group_filter=DIFFERS, max_rounds=5)
    batch = collected.batch
    lengths = [len(row) for row in batch.rollouts.token_ids_BL.unbind()]
    assert lengths == [4, 4, 5, 5, 9, 9]
    assert batch.scores.rewards_B.tolist() == [1.0, 0.0] * 3
    assert [row.row.prompt for row in batch.task.rows] == ["p2", "p3", "p7"]
    assert batch.task.prompts.prompt_index_P.tolist() == [2, 3, 7]


def test_a_greedy_response_to_each_prompt_of_the_batch_is_scored() -> None:
    collected, policy, _ = collect(
        frozenset({1, 4, 6}), group_filter=DIFFERS, max_rounds=5, samples_greedily=True
    )
    assert policy.asked[-1] == (3, 1, 0.0)
    assert collected.greedy_rewards_B is not None
    assert collected.greedy_rewards_B.tolist() == [1.0] * 6


@given(varied=st.frozensets(st.integers(0, 20)), max_rounds=st.integers(1, 6))
def test_a_batch_has_the_earliest_groups_with_signal(
    varied: frozenset[int], max_rounds: int
) -> None:
    collected, policy, source = collect(varied, group_filter=DIFFERS, max_rounds=max_rounds)
    kept = sorted(varied & set(range(source.num_drawn)))[:NUM_PROMPTS]
    chosen = prompts_of(collected.batch)
    assert len(chosen) == NUM_PROMPTS
    assert chosen == sorted(chosen)
    assert set(kept) <= set(chosen)
    learned = [n for n, is_kept in zip(chosen, collected.is_kept_B[::2], strict=True) if is_kept]
    assert learned == kept
    assert len(kept) == NUM_PROMPTS or len(policy.asked) == max_rounds
    assert source.num_drawn == NUM_PROMPTS * len(policy.asked)
