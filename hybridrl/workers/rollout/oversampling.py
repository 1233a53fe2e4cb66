"""More prompts than a step needs are begun; when enough are complete, the others are interrupted.

They continue in the next phase with the tokens that they have (partial rollouts, as slime's
``--partial-rollout`` and Kimi k1.5, arXiv:2501.12599, 2.6.2). So no slot waits for the longest
response, and no token is sampled for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.metrics import Metrics, Sum
from hybridrl.random_streams import response_keys
from hybridrl.sampler import (
    NO_VERSION,
    Program,
    RequestParams,
    Sample,
    Sampler,
    SamplingParams,
    interrupted_sample,
)
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.continuations import continue_once


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

        Args:
            prompts: the open ones and new ones, oldest first. Responses to others are forgotten.
            sampling: how to sample; ``num_complete`` prompts are enough.
            interrupt: of the engine that runs the program.
        """
        index_P: list[int] = prompts.prompt_index_P.tolist()
        size = sampling.num_responses_per_prompt
        keys_PG: list[list[int]] = response_keys(
            prompts.seed_P[:, None], torch.arange(size)
        ).tolist()
        empty = [interrupted_sample(NO_VERSION)] * size
        self._groups = {index: self._groups.get(index, empty) for index in index_P}
        wanted = len(prompts) if sampling.num_complete is None else sampling.num_complete

        async def program(sampler: Sampler) -> Answered:
            if len(self._complete()) < wanted:
                rows = zip(index_P, prompts.token_ids_PL.unbind(), keys_PG, strict=True)
                work = [self._continue_group(sampler, sampling, *row) for row in rows]
                for group in asyncio.as_completed(work):
                    await group
                    if len(self._complete()) >= wanted:
                        interrupt()
            answered = self._complete()[:wanted]
            samples = [sample for index in answered for sample in self._groups.pop(index)]
            return Answered(prompts[[index_P.index(index) for index in answered]], samples)

        return program

    async def _continue_group(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        index: int,
        context_L: Tensor,
        keys: list[int],
    ) -> None:
        """Sample the responses to one prompt to their end, or until they are interrupted."""

        async def ask(
            token_ids: Tensor, params: RequestParams, keys: Sequence[int]
        ) -> list[Sample]:
            return await sampler.sample_group(token_ids, params, keys=keys)

        self._groups[index] = await continue_once(
            ask, self._groups[index], context_L, sampling.request_params(), keys
        )

    def _complete(self) -> list[int]:
        return [
            index
            for index, group in self._groups.items()
            if not any(sample.is_interrupted for sample in group)
        ]
