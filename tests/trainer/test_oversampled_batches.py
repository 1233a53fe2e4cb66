"""Prompts that stay open over phases: each is learned from once, by the engine that began it."""

from __future__ import annotations

import json
from dataclasses import asdict
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.data.rows import SamplerState
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import OversampledBatches
from tests.trainer.test_batches import SAMPLING, source_of_prompts


class Engines:
    """Each completes some of its share; it remembers the prompts that it left open."""

    def __init__(self, number: int, random: Random) -> None:
        self.open: list[set[int]] = [set() for _ in range(number)]
        self.num_prompts: list[int] = []
        self._random = random

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        index_P: list[int] = prompts.prompt_index_P.tolist()
        self.num_prompts.append(len(index_P))
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
        rows = [torch.tensor([index + 1, 9]) for index in answered for _ in range(2)]
        return RolloutBatch(
            token_ids_BL=jagged(rows),
            response_mask_BL=jagged([torch.tensor([False, True])] * len(rows)),
            sampler_logprobs_BL=jagged([torch.zeros(2)] * len(rows)),
            prompt_index_B=torch.tensor(answered).repeat_interleave(2),
            policy_version_B=torch.zeros(len(rows), dtype=torch.int64),
            is_truncated_B=torch.zeros(len(rows), dtype=torch.bool),
            batch_size=[len(rows)],
        )


@settings(max_examples=30)
@given(
    num_engines=st.integers(1, 3),
    per_engine=st.integers(1, 3),
    surplus=st.integers(1, 4),
    num_steps=st.integers(1, 7),
    kills=st.lists(st.integers(1, 7), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_each_prompt_is_learned_from_once_over_kills(
    num_engines: int,
    per_engine: int,
    surplus: int,
    num_steps: int,
    kills: list[int],
    random: Random,
) -> None:
    num_prompts, num_open = per_engine * num_engines, (per_engine + surplus) * num_engines
    learned: dict[int, list[int]] = {}
    saved, saved_step = json.dumps(asdict(source_of_prompts(num_prompts).state())), 0
    for dies_in in [*kills, num_steps + 1]:
        engines, source = Engines(num_engines, random), source_of_prompts(num_prompts)
        source.restore(SamplerState(**json.loads(saved)))
        batches = OversampledBatches(
            source=source,
            engines=engines,
            num_prompts=num_prompts,
            num_open=num_open,
            num_engines=num_engines,
            num_steps=num_steps,
        )
        for step in range(saved_step + 1, num_steps + 1):
            batches.begin(step)
            sampled = batches(SAMPLING)
            most = (num_steps - step + 1) * num_prompts
            assert engines.num_prompts[-1] == min(num_open, most)
            index_P = sampled.task.prompts.prompt_index_P.tolist()
            assert sampled.rollouts.prompt_index_B[::2].tolist() == index_P
            if step == dies_in:  # before the checkpoint of this step
                break
            learned[step] = index_P
            saved, saved_step = json.dumps(asdict(source.state())), step
    trained = [index for of_step in learned.values() for index in of_step]
    assert sorted(trained) == list(range(num_steps * num_prompts))
