"""Batches of a run that samples ahead: each prompt is learned from once, over any kills."""

from __future__ import annotations

import json
from dataclasses import asdict
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch import PromptBatch, RolloutBatch, jagged, row_offsets
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Row, SamplerState
from hybridrl.data.source import PromptSource
from hybridrl.errors import PhaseError
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import AheadBatches
from tests.data.tokenized import source_of
from tests.drawn import cases

NUM_ROWS = 11
SAMPLING = SamplingParams(num_responses_per_prompt=2, max_response_tokens=4, temperature=1.0)


class BackgroundEngines:
    """Answers any of the prompts that it was given; each row is the prompt, twice."""

    def __init__(self, random: Random, *, num_prompts: int) -> None:
        self._num_prompts = num_prompts
        self.open: dict[int, tuple[int, int]] = {}
        self.admitted: list[int] = []
        self._random = random

    def exchange(self, prompts: PromptBatch | None, sampling: SamplingParams) -> RolloutBatch:
        if prompts is not None:
            tokens = prompts.token_ids_PL.values()[row_offsets(prompts.token_ids_PL)[:-1]].tolist()
            index_P, seed_P = prompts.prompt_index_P.tolist(), prompts.seed_P.tolist()
            self.admitted += index_P
            self.open |= dict(zip(index_P, zip(tokens, seed_P, strict=True), strict=True))
        chosen = self._random.sample(sorted(self.open), self._num_prompts)
        rows = [self.open.pop(index)[0] for index in chosen]
        group = sampling.num_responses_per_prompt
        tokens_B = [torch.tensor([token, 99]) for token in rows for _ in range(group)]
        return RolloutBatch(
            token_ids_BL=jagged(tokens_B),
            response_mask_BL=jagged([torch.tensor([False, True])] * len(tokens_B)),
            sampler_logprobs_BL=jagged([torch.zeros(2)] * len(tokens_B)),
            prompt_index_B=torch.tensor(chosen).repeat_interleave(group),
            policy_version_B=torch.zeros(len(tokens_B), dtype=torch.int64),
            is_truncated_B=torch.zeros(len(tokens_B), dtype=torch.bool),
            batch_size=[len(tokens_B)],
        )


def source_of_prompts(num_prompts: int) -> PromptSource:
    rows = [
        TokenizedRow(Row(f"p{n}", "a", "s", f"f:{n}"), f"p{n}", torch.tensor([n + 1]))
        for n in range(NUM_ROWS)
    ]
    return source_of(rows, num_prompts=num_prompts, seed=3)


@cases(by_day=25, by_night=100)
@given(
    num_prompts=st.integers(1, 4),
    num_ahead=st.integers(1, 3),
    num_steps=st.integers(1, 8),
    kills=st.lists(st.integers(0, 8), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_each_prompt_is_learned_from_once_over_kills(
    num_prompts: int, num_ahead: int, num_steps: int, kills: list[int], random: Random
) -> None:
    learned: dict[int, list[int]] = {}
    saved, saved_step = json.dumps(asdict(source_of_prompts(num_prompts).state())), 0
    seeds: dict[int, tuple[int, int]] = {}
    for dies_in in [*kills, num_steps + 1]:
        engines = BackgroundEngines(random, num_prompts=num_prompts)
        source = source_of_prompts(num_prompts)
        source.restore(SamplerState(**json.loads(saved)))
        batches = AheadBatches(
            source=source,
            engines=engines,
            num_prompts=num_prompts,
            num_open=(num_ahead + 1) * num_prompts,
            num_steps=num_steps,
        )
        for step in range(saved_step + 1, num_steps + 1):
            batches.begin(step)
            sampled = batches(SAMPLING)
            for index, of_engines in engines.open.items():  # same row and seed in all processes
                assert seeds.setdefault(index, of_engines) == of_engines
            assert sampled.task.prompts.prompt_index_P.tolist() == (
                sampled.rollouts.prompt_index_B[::2].tolist()
            )
            firsts = sampled.rollouts.token_ids_BL.values()[::4].tolist()
            assert [int(row.token_ids[0]) for row in sampled.task.rows] == firsts
            if step == dies_in:  # before the checkpoint of this step
                break
            learned[step] = sampled.task.prompts.prompt_index_P.tolist()
            assert len(source.open) == min(num_ahead, num_steps - step) * num_prompts
            saved, saved_step = json.dumps(asdict(source.state())), step
    trained = [index for of_step in learned.values() for index in of_step]
    assert sorted(trained) == list(range(num_steps * num_prompts))


def test_as_many_prompts_are_drawn_as_steps_are_left() -> None:
    engines, source = BackgroundEngines(Random(0), num_prompts=2), source_of_prompts(2)
    batches = AheadBatches(source=source, engines=engines, num_prompts=2, num_open=6, num_steps=4)
    drawn = []
    for step in range(1, 5):
        batches.begin(step)
        batches(SAMPLING)
        drawn.append(source.num_drawn)
    assert drawn == [6, 8, 8, 8]
    assert len(source.open) == 0


def test_a_further_batch_of_a_step_draws_further_prompts() -> None:
    engines, source = BackgroundEngines(Random(0), num_prompts=2), source_of_prompts(2)
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
