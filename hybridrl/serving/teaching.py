"""Served teachers: they score each response as it ends, while others are sampled.

Legend: J columns of ``Sample.teacher_JL``, L tokens of a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.batch import PromptBatch
from hybridrl.errors import EngineError
from hybridrl.sampler import (
    Program,
    Reporter,
    RequestParams,
    Sample,
    Sampler,
    SampleRequest,
    SamplingParams,
    Scoring,
)
from hybridrl.serving.background import MakeProgram
from hybridrl.serving.frozen import FrozenModel


@dataclass(slots=True)
class ServedTeachers:
    """The frozen models that teach; a row's prompt has the number of its own."""

    models: Sequence[FrozenModel]
    samplers: Sequence[Sampler] = ()
    """Over the engines of each, while they are open."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let programs ask in the block; engines that are lost are replaced meanwhile."""
        with ExitStack() as stack:
            self.samplers = [stack.enter_context(model.asked()) for model in self.models]
            yield

    def taught(
        self, make: MakeProgram, prompts: PromptBatch, sampling: SamplingParams
    ) -> Program[list[Sample]]:
        """Return a program whose responses have ``teacher_JL``, also those that it reports."""
        top_k = sampling.teacher_top_k
        if top_k is None:
            return make(prompts, sampling)

        async def program(sampler: Sampler) -> list[Sample]:
            lessons = _Lessons(self.samplers, prompts, sampling, top_k)
            try:
                await make(prompts, replace(sampling, reporter=lessons))(sampler)
                tasks = [lessons.tasks[key] for key in sorted(lessons.tasks)]
                return list(await asyncio.gather(*tasks))
            finally:
                for task in lessons.tasks.values():
                    task.cancel()

        return program


class _Lessons(Reporter):
    """Asks about the responses of one program."""

    def __init__(
        self,
        samplers: Sequence[Sampler],
        prompts: PromptBatch,
        sampling: SamplingParams,
        top_k: int,
    ) -> None:
        self._samplers, self._reporter = samplers, sampling.reporter
        self._params = RequestParams(max_new_tokens=1, temperature=sampling.temperature)
        self._top_k = top_k
        self._positions = {index: p for p, index in enumerate(prompts.prompt_index_P.tolist())}
        own_PN, numbers_P = prompts.teacher_prompt_PN, prompts.teacher_P
        self._has_own_prompts = own_PN is not None
        self._prompts = (prompts.token_ids_PL if own_PN is None else own_PN).unbind()
        self._numbers = [0] * len(prompts) if numbers_P is None else numbers_P.tolist()
        self.tasks: dict[tuple[int, int], asyncio.Task[Sample]] = {}
        """By position of the prompt, and number of the response."""

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        """Ask the prompt's teacher, and pass the response on when it has answered."""

        async def teach() -> Sample:
            taught = replace(sample, teacher_JL=await self._score(position, sample))
            if self._reporter is not None:
                self._reporter.report(prompt_index, response_index, taught)
            return taught

        position = self._positions[prompt_index]
        self.tasks[position, response_index] = asyncio.ensure_future(teach())

    async def _score(self, position: int, sample: Sample) -> Tensor:
        """Return float32 [J, L]; 0 without a teacher, and where a further sequence begins."""
        number, num_tokens = self._numbers[position], len(sample.token_ids)
        if number < 0 or not num_tokens:
            return torch.zeros(1 + 2 * self._top_k, num_tokens)
        prompt = self._prompts[position]
        if sample.context is not None and not self._has_own_prompts:
            prompt = sample.context
        ends = pairwise((0, *sample.sequence_begins, num_tokens))
        first, *others = [sample.token_ids[begin:end] for begin, end in ends]
        asked = [self._ask(number, torch.cat([prompt, first]), len(prompt))]
        asked += [self._ask(number, sequence, 1) for sequence in others]
        said, *of_others = await asyncio.gather(*asked)
        return torch.cat([said, *(pad(each_JL, (1, 0)) for each_JL in of_others)], dim=1)

    async def _ask(self, number: int, token_ids: Tensor, begin: int) -> Tensor:
        """Return what a teacher says of the tokens of a sequence from ``begin`` on."""
        scoring = Scoring(begin, self._top_k)
        request = SampleRequest(token_ids, self._params, (0,), scoring=scoring)
        (answer,) = await self._samplers[number].answer(request)
        said_JL = answer.teacher_JL
        if said_JL is None or said_JL.shape != (1 + 2 * self._top_k, len(token_ids) - begin):
            raise EngineError("the engine of a teacher did not score the tokens that it was given")
        return said_JL
