"""Single-turn generation: the simplest program over a sampler."""

from __future__ import annotations

import asyncio
from itertools import chain

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.errors import RequestError
from hybridrl.sampler import Program, Sample, Sampler, SamplingParams, response_keys


def single_turn(prompts: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
    """Return the program that samples G responses to each of P prompts.

    It returns P * G samples in prompt order, those to the same prompt adjacent.
    """
    params = sampling.request_params()
    index_G = torch.arange(sampling.num_responses_per_prompt)
    index_P = prompts.prompt_index_P.tolist()
    keys_PG: list[list[int]] = response_keys(prompts.seed_P[:, None], index_G).tolist()

    async def sample_prompt(
        sampler: Sampler, number: int, token_ids: Tensor, keys: list[int]
    ) -> list[Sample]:
        try:
            samples = await sampler.sample_group(token_ids, params, keys=keys)
        except RequestError as error:
            error.add_note(f"this was prompt {number} of its batch")
            raise
        if sampling.reporter is not None:
            for index, sample in enumerate(samples):
                sampling.reporter.report(index_P[number], index, sample)
        return samples

    async def program(sampler: Sampler) -> list[Sample]:
        rows = zip(prompts.token_ids_PL.unbind(), keys_PG, strict=True)
        work = [
            sample_prompt(sampler, number, token_ids, keys_G)
            for number, (token_ids, keys_G) in enumerate(rows)
        ]
        return list(chain.from_iterable(await asyncio.gather(*work)))

    return program
