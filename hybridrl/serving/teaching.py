"""Served teachers: they score each response as it ends, while others are sampled.

Legend: J columns of ``Sample.teacher_JL``, L tokens of a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.batch import PromptBatch
from hybridrl.errors import EngineError, RequestError
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
        if sampling.teacher_top_k is None:
            return make(prompts, sampling)

        async def program(sampler: Sampler) -> list[Sample]:
            try:
                async with asyncio.TaskGroup() as group:  # one that fails ends all others
                    lessons = _Lessons(self.samplers, prompts, sampling, group)
                    await make(prompts, replace(sampling, reporter=lessons))(sampler)
            except BaseExceptionGroup as errors:
                (first, *_) = errors.exceptions
                raise first from first.__cause__
            return [lessons.tasks[key].result() for key in sorted(lessons.tasks)]

        return program


@dataclass(frozen=True, slots=True)
class _Lessons(Reporter):
    """Asks about the responses of one program."""

    samplers: Sequence[Sampler]
    prompts: PromptBatch
    sampling: SamplingParams
    group: asyncio.TaskGroup
    tasks: dict[tuple[int, int], asyncio.Task[Sample]] = field(default_factory=dict)
    """By position of the prompt, and number of the response."""

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        """Ask the prompt's teacher, and pass the response on when it has answered."""

        async def teach() -> Sample:
            taught = replace(sample, teacher_JL=await self._score(position, sample))
            if self.sampling.reporter is not None:
                self.sampling.reporter.report(prompt_index, response_index, taught)
            return taught

        position = int((self.prompts.prompt_index_P == prompt_index).nonzero()[0])
        lesson = teach()
        try:
            self.tasks[position, response_index] = self.group.create_task(lesson)
        except RuntimeError:  # another lesson failed, and all end
            lesson.close()
            raise

    @property
    def _top_k(self) -> int:
        return self.sampling.teacher_top_k or 0

    async def _score(self, position: int, sample: Sample) -> Tensor:
        """Return float32 [J, L]; 0 without a teacher, and where a further sequence begins."""
        numbers_P, own_PN = self.prompts.teacher_P, self.prompts.teacher_prompt_PN
        number = 0 if numbers_P is None else int(numbers_P[position])
        num_tokens = len(sample.token_ids)
        if number < 0 or not num_tokens:
            return torch.zeros(1 + 2 * self._top_k, num_tokens)
        prompt = (self.prompts.token_ids_PL if own_PN is None else own_PN)[position]
        if sample.context is not None and own_PN is None:
            prompt = sample.context
        ends = pairwise((0, *sample.sequence_begins, num_tokens))
        first, *others = [sample.token_ids[begin:end] for begin, end in ends]
        asked = [self._ask(number, torch.cat([prompt, first]), len(prompt))]
        asked += [self._ask(number, sequence, 1) for sequence in others]
        said, *of_others = await asyncio.gather(*asked)
        return torch.cat([said, *(pad(each_JL, (1, 0)) for each_JL in of_others)], dim=1)

    async def _ask(self, number: int, token_ids: Tensor, begin: int) -> Tensor:
        """Have a teacher score the tokens of a sequence from ``begin`` on."""
        params = RequestParams(max_new_tokens=1, temperature=self.sampling.temperature)
        scoring = Scoring(begin, self._top_k)
        request = SampleRequest(token_ids, params, (0,), scoring=scoring)
        try:
            (answer,) = await self.samplers[number].answer(request)
        except RequestError as error:
            error.add_note("a teacher was asked: see max_context_tokens of its serving.models")
            raise
        said_JL = answer.teacher_JL
        if said_JL is None or said_JL.shape != (1 + 2 * self._top_k, len(token_ids) - begin):
            raise EngineError("the engine of a teacher did not score the tokens that it was given")
        return said_JL
