"""Sampling for a step: a small policy whose responses and rewards follow from the prompt alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.load import Part
from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Row
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import DrawnBatches, ScoredRollouts
from hybridrl.trainer.collect import Collected, Collector
from hybridrl.trainer.step_metrics import Clock
from tests.data.tokenized import source_of

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
        return RolloutBatch(
            token_ids_BL=jagged([torch.arange(length) for length in lengths]),
            response_mask_BL=jagged(masks),
            sampler_logprobs_BL=jagged([-mask.float() for mask in masks]),
            prompt_index_B=index_B,
            policy_version_B=torch.zeros_like(index_B),
            is_truncated_B=torch.zeros(len(index_B), dtype=torch.bool),
            batch_size=[len(index_B)],
        )


@dataclass(frozen=True)
class ListedReward:
    """The first response to prompt n earns 1; the others too, unless n is in the list."""

    varied: frozenset[int]

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        return nullcontext(sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        group = len(rollouts) // len(task.rows)
        is_first_B = torch.arange(len(rollouts)) % group == 0
        is_varied_B = torch.tensor([int(n) in self.varied for n in rollouts.prompt_index_B])
        rewards_B = (is_first_B | ~is_varied_B).float()
        failed_B1 = torch.zeros(len(rollouts), 1, dtype=torch.bool)
        return Scores(("listed",), torch.ones(1), rewards_B[:, None], failed_B1)


def differs(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Keep the groups with more than one reward."""
    groups = [rewards_B[group_B == group] for group in group_B.tolist()]
    return torch.tensor([len(rewards.unique()) > 1 for rewards in groups])


def source_of_prompts() -> PromptSource:
    rows = [
        TokenizedRow(Row(f"p{n}", "a", "s", f"f:{n}"), f"p{n}", torch.tensor([n + 1]))
        for n in range(40)
    ]
    return source_of(rows, num_prompts=NUM_PROMPTS, seed=0, shuffle=False)


def batches_of(source: PromptSource, policy: CountingPolicy, reward: ListedReward) -> DrawnBatches:
    return DrawnBatches(draw=source.next, engines=policy, while_sampling=reward.while_sampling)


def collect(
    varied: frozenset[int], *, max_rounds: int, samples_greedily: bool = False
) -> tuple[Collected, CountingPolicy, PromptSource]:
    policy, source, reward = CountingPolicy(), source_of_prompts(), ListedReward(varied)
    collector = Collector(
        batches=batches_of(source, policy, reward),
        policy=policy,
        sampling=SAMPLING,
        reward=reward,
        group_filter=Part.of(differs),
        max_rounds=max_rounds,
        samples_greedily=samples_greedily,
    )
    return collector(Clock()), policy, source


def prompts_of(scored: ScoredRollouts) -> list[int]:
    return scored.rollouts.prompt_index_B[:: scored.num_responses].tolist()


def values(collected: Collected) -> dict[str, float]:
    return {name: metric.value for name, metric in collected.metrics.items()}


def test_without_a_filter_all_responses_are_learned_from() -> None:
    policy, source, reward = CountingPolicy(), source_of_prompts(), ListedReward(frozenset())
    collector = Collector(
        batches=batches_of(source, policy, reward),
        policy=policy,
        sampling=SAMPLING,
        reward=reward,
    )
    collected = collector(Clock())
    assert collected.batch is collected.everything
    assert collected.is_kept_B.all()
    assert source.num_drawn == NUM_PROMPTS


def test_groups_without_signal_are_replaced_by_further_prompts() -> None:
    collected, policy, source = collect(frozenset({1, 4, 6, 8}), max_rounds=5)
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
    collected, policy, _ = collect(frozenset({4}), max_rounds=2)
    assert len(policy.asked) == 2
    assert prompts_of(collected.batch) == [0, 1, 4]  # as many as a step has
    assert collected.is_kept_B.tolist() == [False] * 4 + [True] * 2
    assert values(collected)["groups/learned"] == 1


def test_rows_tokens_and_rewards_of_a_prompt_stay_together() -> None:
    collected, _, _ = collect(frozenset({2, 3, 7}), max_rounds=5)
    batch = collected.batch
    lengths = [len(row) for row in batch.rollouts.token_ids_BL.unbind()]
    assert lengths == [4, 4, 5, 5, 9, 9]
    assert batch.scores.rewards_B.tolist() == [1.0, 0.0] * 3
    assert [row.row.prompt for row in batch.task.rows] == ["p2", "p3", "p7"]
    assert batch.task.prompts.prompt_index_P.tolist() == [2, 3, 7]


def test_a_greedy_response_to_each_prompt_of_the_batch_is_scored() -> None:
    collected, policy, _ = collect(frozenset({1, 4, 6}), max_rounds=5, samples_greedily=True)
    assert policy.asked[-1] == (3, 1, 0.0)
    assert collected.greedy_rewards_B is not None
    assert collected.greedy_rewards_B.tolist() == [1.0] * 6


@given(varied=st.frozensets(st.integers(0, 20)), max_rounds=st.integers(1, 6))
def test_a_batch_has_the_earliest_groups_with_signal(
    varied: frozenset[int], max_rounds: int
) -> None:
    collected, policy, source = collect(varied, max_rounds=max_rounds)
    kept = sorted(varied & set(range(source.num_drawn)))[:NUM_PROMPTS]
    chosen = prompts_of(collected.batch)
    assert len(chosen) == NUM_PROMPTS
    assert chosen == sorted(chosen)
    assert set(kept) <= set(chosen)
    learned = [n for n, is_kept in zip(chosen, collected.is_kept_B[::2], strict=True) if is_kept]
    assert learned == kept
    assert len(kept) == NUM_PROMPTS or len(policy.asked) == max_rounds
    assert source.num_drawn == NUM_PROMPTS * len(policy.asked)
