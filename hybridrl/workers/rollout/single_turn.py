"""Single-turn generation: the simplest programs over a sampler.

With ``OpenResponses`` more prompts than a step needs are begun; when enough are complete, the
others are interrupted. They continue in the next phase (partial rollouts, as slime's
``--partial-rollout`` and Kimi k1.5, arXiv:2501.12599, 2.6.2). So no slot waits for the longest
response, and no token is sampled for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from hybridrl.batch import PromptBatch, images_of
from hybridrl.errors import RequestError, SampledPlaceholderError
from hybridrl.metrics import Metrics, Sum
from hybridrl.sampler import (
    NO_VERSION,
    Program,
    Sample,
    Sampler,
    SampleRequest,
    SamplingParams,
    interrupted_sample,
    join_parts,
    response_keys,
)
from hybridrl.workers.rollout.assemble import Answered

Ask = Callable[[SampleRequest], Awaitable[list[Sample]]]
"""Samples the continuations; they may be interrupted."""


def single_turn(prompts: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
    """Return the program that samples P * G responses, those to the same prompt adjacent."""
    index_P = prompts.prompt_index_P.tolist()

    async def sample_prompt(sampler: Sampler, number: int, request: SampleRequest) -> list[Sample]:
        try:
            samples = await sampler.answer(request)
        except RequestError as error:
            error.add_note(f"this was prompt {number} of its batch")
            raise
        if sampling.reporter is not None:
            for index, sample in enumerate(samples):
                sampling.reporter.report(index_P[number], index, sample)
        return samples

    async def program(sampler: Sampler) -> list[Sample]:
        requests = enumerate(_requests_of(prompts, sampling))
        work = [sample_prompt(sampler, number, request) for number, request in requests]
        return list(chain.from_iterable(await asyncio.gather(*work)))

    return program


def _requests_of(prompts: PromptBatch, sampling: SamplingParams) -> list[SampleRequest]:
    """Ask for G responses to each of P prompts."""
    params = sampling.request_params()
    index_G = torch.arange(sampling.num_responses_per_prompt)
    keys_PG: list[list[int]] = response_keys(prompts.seed_P[:, None], index_G).tolist()
    rows = zip(prompts.token_ids_PL.unbind(), keys_PG, images_of(prompts), strict=True)
    return [SampleRequest(token_ids, params, keys, images) for token_ids, keys, images in rows]


async def sample_to_the_end(ask: Ask, request: SampleRequest) -> list[Sample]:
    """Sample several continuations of one context, until none is interrupted any more.

    Those that ended stay as they are. A response keeps its key, so its random numbers are those
    of one that was not interrupted.
    """
    samples = await ask(request)
    while any(sample.is_interrupted for sample in samples):
        samples = await continue_once(ask, samples, request)
    return samples


async def continue_once(
    ask: Ask, samples: Sequence[Sample], request: SampleRequest
) -> list[Sample]:
    """Ask once for what interrupted samples of a request lack; they may be interrupted again."""
    joined = list(samples)

    async def ask_for(members: Sequence[int]) -> None:
        begun_L = samples[members[0]].token_ids
        params = request.params
        further = replace(
            request,
            token_ids=torch.cat([request.token_ids, begun_L]),
            params=replace(params, max_new_tokens=params.max_new_tokens - len(begun_L)),
            keys=[request.keys[index] for index in members],
        )
        try:
            answers = await ask(further)
        except SampledPlaceholderError:
            if not len(begun_L):
                raise
            joined[members[0]] = replace(samples[members[0]], finish_reason="length")
            return
        for index, answer in zip(members, answers, strict=True):
            joined[index] = join_parts(samples[index], answer)

    interrupted = [index for index, sample in enumerate(samples) if sample.is_interrupted]
    requests = [[index] for index in interrupted if len(samples[index].token_ids)]
    empty = [index for index in interrupted if not len(samples[index].token_ids)]
    if empty:  # they share a request
        requests.append(empty)
    tasks = [asyncio.ensure_future(ask_for(members)) for members in requests]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return joined


class OpenResponses:
    """The prompts of one rank that are not complete, and the responses to them so far.

    They are kept between phases, in this process alone: a run that resumes samples its open prompts
    again from the first token.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[Sample]] = {}

    def metrics(self) -> Metrics:
        """Describe what is open after a phase, under declared names."""
        samples = [sample for group in self._groups.values() for sample in group]
        lengths = [len(sample.token_ids) for sample in samples if sample.is_interrupted]
        return {
            "rollout/open_prompts": Sum(len(self._groups)),
            "rollout/interrupted_responses": Sum(sum(length > 0 for length in lengths)),
            "rollout/interrupted_tokens": Sum(sum(lengths)),
        }

    def program(
        self, prompts: PromptBatch, sampling: SamplingParams, *, interrupt: Callable[[], None]
    ) -> Program[Answered]:
        """Return the program that samples responses to all prompts until enough are complete.

        It answers the first ``num_complete`` of the complete prompts, in the order of ``prompts``.
        Then it calls ``interrupt``, of the engine that runs it. Prompts are the open ones and new
        ones, oldest first; responses to others are forgotten.
        """
        index_P: list[int] = prompts.prompt_index_P.tolist()
        empty = [interrupted_sample(NO_VERSION)] * sampling.num_responses_per_prompt
        self._groups = {index: self._groups.get(index, empty) for index in index_P}
        wanted = len(prompts) if sampling.num_complete is None else sampling.num_complete

        async def continue_group(sampler: Sampler, index: int, request: SampleRequest) -> None:
            samples = self._groups[index]
            self._groups[index] = await continue_once(sampler.answer, samples, request)

        async def program(sampler: Sampler) -> Answered:
            if len(self._complete()) < wanted:
                requests = zip(index_P, _requests_of(prompts, sampling), strict=True)
                work = [continue_group(sampler, *request) for request in requests]
                for group in asyncio.as_completed(work):
                    await group
                    if len(self._complete()) >= wanted:
                        interrupt()
            answered = self._complete()[:wanted]
            samples = [sample for index in answered for sample in self._groups.pop(index)]
            return Answered(prompts[[index_P.index(index) for index in answered]], samples)

        return program

    def _complete(self) -> list[int]:
        return [
            index
            for index, group in self._groups.items()
            if not any(sample.is_interrupted for sample in group)
        ]
