from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.load import Part
from hybridrl.batch import PromptBatch, RolloutBatch, row_offsets
from hybridrl.data.rows import SamplerState
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import PhaseError, TrainingError
from hybridrl.rewards.scorer import Scores
from hybridrl.run.rows import lessons_of
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import (
    AheadBatches,
    DrawnBatches,
    OversampledBatches,
    Sampled,
    ScoredRollouts,
)
from hybridrl.trainer.collect import Collected, Collector
from hybridrl.trainer.step_metrics import Clock
from tests.config.values import config_of
from tests.drawn import cases
from tests.trainer.rollouts import ScoredAfterwards, rollouts_of, row_of, scores_of, source_of_rows

SAMPLING = SamplingParams(num_responses_per_prompt=2, max_response_tokens=4, temperature=1.0)


def source_of_prompts(num_prompts: int) -> PromptSource:
    return source_of_rows(11, num_prompts=num_prompts)


def answers_of(tokens: list[int], index: list[int]) -> RolloutBatch:
    """Two answers to each prompt: its token, and one more."""
    rows = [torch.tensor([token, 99]) for token in tokens for _ in range(2)]
    masks = [torch.tensor([False, True])] * len(rows)
    return rollouts_of(rows, masks, torch.tensor(index).repeat_interleave(2))


def learn_over_kills(
    build: Callable[[PromptSource], Any],
    check: Callable[[PromptSource, int, Sampled], None],
    *,
    num_prompts: int,
    num_steps: int,
    kills: list[int],
) -> None:
    """Let a run be killed before the checkpoint of each of the steps, and end."""
    learned: dict[int, list[int]] = {}
    saved, saved_step = json.dumps(asdict(source_of_prompts(num_prompts).state())), 0
    for dies_in in [*kills, num_steps + 1]:
        source = source_of_prompts(num_prompts)
        source.restore(SamplerState(**json.loads(saved)))
        batches = build(source)
        for step in range(saved_step + 1, num_steps + 1):
            batches.begin(step)
            sampled = batches(SAMPLING)
            index_P = sampled[0].prompts.prompt_index_P.tolist()
            assert sampled[1].prompt_index_B[::2].tolist() == index_P
            check(source, step, sampled)
            if step == dies_in:
                break
            learned[step] = index_P
            saved, saved_step = json.dumps(asdict(source.state())), step
    trained = [index for of_step in learned.values() for index in of_step]
    assert sorted(trained) == list(range(num_steps * num_prompts))


class BackgroundEngines:
    """Answers any of the prompts that it was given."""

    def __init__(self, random: Random, *, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self.open: dict[int, tuple[int, int]] = {}
        self._random = random

    def exchange(self, prompts: PromptBatch | None, sampling: SamplingParams) -> RolloutBatch:
        if prompts is not None:
            tokens = prompts.token_ids_PL.values()[row_offsets(prompts.token_ids_PL)[:-1]].tolist()
            index_P, seed_P = prompts.prompt_index_P.tolist(), prompts.seed_P.tolist()
            self.open |= dict(zip(index_P, zip(tokens, seed_P, strict=True), strict=True))
        chosen = self._random.sample(sorted(self.open), self._num_prompts)
        return answers_of([self.open.pop(index)[0] for index in chosen], chosen)


@cases(by_day=25, by_night=100)
@given(
    num_prompts=st.integers(1, 4),
    num_ahead=st.integers(1, 3),
    num_steps=st.integers(1, 8),
    kills=st.lists(st.integers(0, 8), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_each_prompt_sampled_ahead_is_learned_from_once_over_kills(
    num_prompts: int, num_ahead: int, num_steps: int, kills: list[int], random: Random
) -> None:
    seeds: dict[int, tuple[int, int]] = {}
    engines = BackgroundEngines(random, num_prompts=num_prompts)

    def build(source: PromptSource) -> AheadBatches:
        engines.open.clear()
        return AheadBatches(
            source=source,
            engines=engines,
            num_prompts=num_prompts,
            num_open=(num_ahead + 1) * num_prompts,
            num_steps=num_steps,
        )

    def check(source: PromptSource, step: int, sampled: Sampled) -> None:
        for index, of_engines in engines.open.items():  # same row and seed in all processes
            assert seeds.setdefault(index, of_engines) == of_engines
        firsts = sampled[1].token_ids_BL.values()[::4].tolist()
        assert [int(row.token_ids[0]) for row in sampled[0].rows] == firsts
        assert len(source.open) == min(num_ahead, num_steps - step) * num_prompts

    learn_over_kills(build, check, num_prompts=num_prompts, num_steps=num_steps, kills=kills)


class SharingEngines:
    """Each completes some of its share; it remembers the prompts that it left open."""

    def __init__(self, number: int, random: Random) -> None:
        self.open: list[set[int]] = [set() for _ in range(number)]
        self.num_prompts = 0
        self._random = random

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        index_P: list[int] = prompts.prompt_index_P.tolist()
        self.num_prompts = len(index_P)
        size, left = divmod(len(index_P), len(self.open))
        assert left == 0
        answered = []
        for number in range(len(self.open)):
            share = index_P[number * size : (number + 1) * size]
            assert self.open[number] <= set(share)  # which stay where their tokens are
            assert share == sorted(share)
            assert sampling.num_complete is not None
            complete = sorted(self._random.sample(share, sampling.num_complete))
            self.open[number] = set(share) - set(complete)
            answered += complete
        return answers_of([index + 1 for index in answered], answered)


@cases(by_day=15, by_night=100)
@given(
    num_engines=st.integers(1, 3),
    per_engine=st.integers(1, 3),
    surplus=st.integers(1, 4),
    num_steps=st.integers(1, 7),
    kills=st.lists(st.integers(1, 7), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_each_prompt_that_stays_open_is_learned_from_once_by_its_engine_over_kills(
    num_engines: int,
    per_engine: int,
    surplus: int,
    num_steps: int,
    kills: list[int],
    random: Random,
) -> None:
    num_prompts, num_open = per_engine * num_engines, (per_engine + surplus) * num_engines
    engines = SharingEngines(num_engines, random)

    def build(source: PromptSource) -> OversampledBatches:
        engines.open = [set() for _ in range(num_engines)]
        return OversampledBatches(
            source=source,
            engines=engines,
            num_prompts=num_prompts,
            num_open=num_open,
            num_engines=num_engines,
            num_steps=num_steps,
        )

    def check(_: PromptSource, step: int, sampled: Sampled) -> None:
        assert engines.num_prompts == min(num_open, (num_steps - step + 1) * num_prompts)

    learn_over_kills(build, check, num_prompts=num_prompts, num_steps=num_steps, kills=kills)


def test_a_further_batch_of_a_step_draws_further_prompts() -> None:
    source, engines = source_of_prompts(2), BackgroundEngines(Random(0), num_prompts=2)
    batches = AheadBatches(source=source, engines=engines, num_prompts=2, num_open=4, num_steps=4)
    batches.begin(1)
    batches(SAMPLING)
    batches(SAMPLING)
    assert source.num_drawn == 6


def test_a_prompt_that_comes_twice_is_refused() -> None:
    source = source_of_prompts(2)
    source.open.add(source.next())
    source.open.take([1])
    with pytest.raises(PhaseError, match=r"prompts \[1, 0\]; of these \[1\] are not open"):
        source.open.take([1, 0])
    with pytest.raises(PhaseError, match="come twice"):
        source.open.take([0, 0])
    assert source.open.indices == (0,)


NUM_PROMPTS, NUM_RESPONSES = 3, 2
STOPPING = SamplingParams(
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
        sampling=STOPPING,
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


@pytest.mark.parametrize(
    ("returned", "found"),
    [(True, "a bool"), (torch.ones(6), r"float32 \[6\]"), (torch.ones(3) > 0, r"bool \[3\]")],
)
def test_a_group_filter_that_returns_another_type_is_named(returned: object, found: str) -> None:
    part = replace(DIFFERS, inputs=(), function=lambda: returned, spelled="own.py:keep")
    with pytest.raises(TrainingError, match=rf"own.py:keep returned {found}, .* bool \[6\]"):
        collect(frozenset(), group_filter=part)


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


def test_a_step_of_which_no_group_is_kept_says_so(caplog: pytest.LogCaptureFixture) -> None:
    collected, _, _ = collect(frozenset({7}), group_filter=DIFFERS, max_rounds=2)
    assert not collected.is_kept_B.any()
    (told,) = caplog.messages
    assert "kept none of 6 groups, and the step learns nothing" in told
    assert "algorithm.max_sampling_rounds=2" in told


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


@cases(by_day=40, by_night=300)
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
    assert len(varied & set(range(source.num_drawn - NUM_PROMPTS))) < NUM_PROMPTS


MIXED = (
    *("data.task=null", "eval.every_num_steps=0", "algorithm.teacher_path=initial"),
    "algorithm.by_source={a: {advantage: distillation}}",
    "algorithm.old_logprobs=recompute",
)


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["algorithm.divergence_coefficient=0"], [0, -1, 0]),
        (["algorithm.divergence_coefficient=1"], [0, 0, 0]),
        (
            ["algorithm.teacher_paths={b: policy}", "algorithm.teacher_prompt='{prompt}'"],
            [1, 0, 1],
        ),
    ],
)
def test_rows_that_are_compared_with_a_teacher_have_that_of_their_source(
    tmp_path: Path, overrides: list[str], numbers: list[int]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1", "answer": "1"}))
    sources = ", ".join(f"{source}: {{files: ['{file}']}}" for source in "ab")
    common = ("algorithm.divergence_coefficient=1", f"data.sources={{{sources}}}")
    config = config_of(*MIXED, *common, *overrides)
    lessons = lessons_of(config, build_starter_tokenizer())
    assert lessons is not None
    rows = [row_of(n, source=source) for n, source in enumerate("aba")]
    assert lessons.columns(rows)["teacher_P"].tolist() == numbers
