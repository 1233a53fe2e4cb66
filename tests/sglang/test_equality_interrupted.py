"""Responses of a real server that are interrupted, and continued as if they had not been."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridrl.metrics import Sum
from hybridrl.sampler import Sample
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import OpenResponses, single_turn
from tests.workers.rollout.engines import make_prompts, sampling_params

PROMPTS = make_prompts((4, 30, 5, 60, 6, 85))  # the context of 96 tokens ends each response
GREEDY = sampling_params(group=2, tokens=90, temperature=0.0)


@pytest.mark.timeout(200)
def test_phases_of_a_server_give_what_one_phase_gives(engine: SGLangEngine) -> None:
    uncut = engine.run(single_turn(PROMPTS, GREEDY))
    engine.take_metrics()
    responses, is_open, num_interrupted = OpenResponses(), list(range(len(PROMPTS))), 0.0
    samples: dict[int, list[Sample]] = {}
    while is_open:
        sampling = replace(GREEDY, num_complete=2)
        program = responses.program(PROMPTS[is_open], sampling, interrupt=engine.interrupt)
        answered = engine.run(program)
        for number, index in enumerate(answered.prompts.prompt_index_P.tolist()):
            samples[index] = answered.samples[2 * number : 2 * number + 2]
            is_open.remove(index)
        engine.pause()
        assert engine.drain(timeout_s=10.0) == 0
        engine.continue_generation()
        interrupted = responses.metrics()["rollout/interrupted_tokens"]
        assert isinstance(interrupted, Sum)
        num_interrupted += interrupted.value
    assert num_interrupted > 0
    assert engine.take_metrics()["rollout/retried_requests"] == Sum(0)
    for index, group in samples.items():
        for sibling, sample in enumerate(group):
            expected = uncut[2 * index + sibling]
            assert sample.token_ids.tolist() == expected.token_ids.tolist()
            assert sample.finish_reason == expected.finish_reason == "length"
            torch.testing.assert_close(sample.logprobs, expected.logprobs, atol=1e-4, rtol=0)
