"""Generate calls against a small server that samples nothing but keeps SGLang's form of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch
from aiohttp import web

from hybridrl.batch import PromptBatch, jagged
from hybridrl.errors import EngineError
from hybridrl.metrics import Metrics
from hybridrl.workers.rollout.event_loop import run_program
from hybridrl.workers.rollout.protocol import SamplingParams
from hybridrl.workers.rollout.request_gate import RequestGate
from hybridrl.workers.rollout.sampler import Sample, Sampler
from hybridrl.workers.rollout.sampling import response_keys
from hybridrl.workers.rollout.sglang.client import ServerClient, ServerError
from hybridrl.workers.rollout.sglang.sampling import ServedModel, ServerSampler, read_sample
from hybridrl.workers.rollout.single_turn import single_turn
from tests.workers.rollout.answering import Answering, Body, answering

SAMPLING = SamplingParams(
    num_responses_per_prompt=3, max_response_tokens=4, temperature=1.0, stop_token_ids=(9,)
)
Run = Callable[[], tuple[list[Sample], Metrics]]
PROMPTS = PromptBatch(
    token_ids_PL=jagged([torch.tensor([1, 2, 3]), torch.tensor([4, 5])]),
    prompt_index_P=torch.tensor([7, 8]),
    seed_P=torch.tensor([70, 80]),
    batch_size=[2],
)


def item(prompt: list[int], parameters: Body, *, finish: str = "length") -> Body:
    """The answer to one response: its tokens are the prompt's first one, over and over."""
    tokens = [prompt[0]] * parameters["max_new_tokens"]
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish, "message": "Aborted"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "cached_tokens": len(prompt) - 1,
            "weight_version": "5",
        },
    }


class Samples:
    """Answers /generate; ``finish`` says why a response ended, by seed and how often it came."""

    def __init__(self, finish: Callable[[int, int], str]) -> None:
        self._finish = finish
        self.times: Counter[int] = Counter()

    async def __call__(self, _: str, body: Body) -> web.StreamResponse:
        parameters = body["sampling_params"]
        if isinstance(parameters, dict):
            return web.json_response(item(body["input_ids"], parameters))
        answers = []
        for prompt, wanted in zip(body["input_ids"], parameters, strict=True):
            seed = wanted["sampling_seed"]
            self.times[seed] += 1
            answers.append(item(prompt, wanted, finish=self._finish(seed, self.times[seed])))
        return web.json_response(answers)


@contextmanager
def sampling_from(
    answer: Callable[[str, Body], Any], *, version: int = 5, gate: RequestGate | None = None
) -> Iterator[tuple[Answering, Run]]:
    model = ServedModel(max_context_tokens=6, vocab_size=64, version=version, adapter="policy")

    def run() -> tuple[list[Sample], Metrics]:
        with (gate or RequestGate()).admit() as call:
            sampler = ServerSampler(client, model, call, timeout_s=30.0)

            async def program(_: Sampler) -> list[Sample]:
                async with sampler:
                    return await single_turn(PROMPTS, SAMPLING)(sampler)

            return run_program(program, sampler, call), sampler.metrics()

    with answering(answer) as server:
        client = ServerClient(server.url, name="the server", require_alive=lambda _: None)
        try:
            yield server, run
        finally:
            client.close()


def test_each_response_has_the_embedded_engines_random_stream() -> None:
    with sampling_from(Samples(lambda _, __: "length")) as (server, run):
        run()
    keys = response_keys(PROMPTS.seed_P.repeat_interleave(3), torch.arange(3).repeat(2))
    seeds = [
        (tokens[0], parameters["sampling_seed"])
        for _, body in server.asked
        if isinstance(body["sampling_params"], list)
        for tokens, parameters in zip(body["input_ids"], body["sampling_params"], strict=True)
    ]
    expected = [int(key) & 0x7FFFFFFF for key in keys]
    assert sorted(seeds) == sorted(zip([1] * 3 + [4] * 3, expected, strict=True))
    assert len(set(expected)) == 6


def test_a_group_is_prefilled_once_and_then_asked_for_as_a_whole() -> None:
    with sampling_from(Samples(lambda _, __: "length")) as (server, run):
        responses, metrics = run()
    bodies = [body for _, body in server.asked]
    prefills = [body for body in bodies if isinstance(body["sampling_params"], dict)]
    wholes = [body for body in bodies if isinstance(body["sampling_params"], list)]
    assert sorted(body["input_ids"] for body in prefills) == [[1, 2, 3], [4, 5]]
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in prefills)
    assert sorted(len(body["input_ids"]) for body in wholes) == [3, 3]
    assert all(body["lora_path"] == "policy" for body in bodies)
    assert [r.token_ids.tolist() for r in responses] == [[1] * 3] * 3 + [[4] * 4] * 3
    assert all(r.is_truncated for r in responses)
    assert metrics["rollout/prefix_cache_hit_fraction"].value == pytest.approx(9 / 15)


def test_only_a_response_that_was_cut_off_is_asked_for_again() -> None:
    victim = int(response_keys(PROMPTS.seed_P[1:], torch.tensor([2]))) & 0x7FFFFFFF
    answer = Samples(lambda seed, time: "abort" if seed == victim and time < 3 else "stop")
    with sampling_from(answer) as (_, run):
        responses, metrics = run()
    assert len(responses) == 6
    assert not any(r.is_truncated for r in responses)
    assert answer.times[victim] == 3
    assert sum(answer.times.values()) == 8
    assert metrics["rollout/retried_requests"].value == 2


@pytest.mark.shows("1.19")
def test_a_response_cut_off_three_times_is_never_scored() -> None:
    with (
        sampling_from(Samples(lambda _, __: "abort")) as (_, run),
        pytest.raises(EngineError, match=r"3 of 3 responses were cut off 3 times.*Aborted"),
    ):
        run()


def test_what_was_cut_off_on_purpose_is_not_asked_for_again() -> None:
    gate, is_asked, has_ended = RequestGate(), Event(), asyncio.Event()
    answers = Samples(lambda _, __: "abort")

    async def abort_late(path: str, body: Body) -> web.StreamResponse:
        if isinstance(body["sampling_params"], list):
            is_asked.set()
            await asyncio.wait_for(has_ended.wait(), timeout=5.0)
        return await answers(path, body)

    with sampling_from(abort_late, gate=gate) as (server, run), ThreadPoolExecutor(1) as pool:
        call = pool.submit(run)
        assert is_asked.wait(10.0)
        assert gate.drain(timeout_s=0.0) == 6
        with pytest.raises(EngineError, match="aborted 6 of 6 requests"):
            call.result(10.0)
        assert len(server.asked) <= 4  # of each group the prefill, and all its responses at once


def test_a_response_of_other_weights_is_refused() -> None:
    with (
        sampling_from(Samples(lambda _, __: "stop"), version=6) as (_, run),
        pytest.raises(EngineError, match="weights of version 5, and the policy is at 6"),
    ):
        run()


def test_a_request_that_is_refused_is_not_repeated() -> None:
    asked = 0

    async def refuse(_: str, __: Body) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response({"error": {"message": "context too long"}}, status=400)

    with sampling_from(refuse) as (_, run), pytest.raises(ServerError, match="too long"):
        run()
    assert asked == 2  # one a group


def test_log_probs_of_other_tokens_are_refused() -> None:
    torn = item([1], {"max_new_tokens": 2})
    torn["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError, match="2 tokens and log-probs of 1 others"):
        read_sample(torn, ServedModel(max_context_tokens=6, vocab_size=64, version=5))
