"""Groups of responses that are sampled in the background, and the batches that they make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.batch import PromptBatch
from hybridrl.metrics import Max, Metrics, Sum
from hybridrl.sampler import Program, Reporter, Sample, Sampler, SamplingParams
from hybridrl.serving.sample_buffer import SampleBuffer
from hybridrl.single_controller.payload import concat_rows
from hybridrl.workers.rollout.assemble import Answered

MakeProgram = Callable[[PromptBatch, SamplingParams], Program[list[Sample]]]
"""Makes the program that samples G responses to each prompt, and reports them as they end."""


@dataclass(frozen=True, slots=True)
class _Collecting:
    """Hears of the responses to the prompts that were admitted together."""

    size: int
    """G, responses to each."""

    complete: Callable[[int, list[Sample]], None]
    reporter: Reporter | None
    begun: dict[int, dict[int, Sample]] = field(default_factory=dict)

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        """Take a response; the last one of its group completes that."""
        group = self.begun.setdefault(prompt_index, {})
        group[response_index] = sample
        if self.reporter is not None:
            self.reporter.report(prompt_index, response_index, sample)
        if len(group) == self.size:
            del self.begun[prompt_index]
            self.complete(prompt_index, [group[number] for number in range(self.size)])


class OpenGroups:
    """Samples admitted prompts to the end, whatever weights come meanwhile. For one event loop."""

    def __init__(self, sampler: Sampler, make_program: MakeProgram, buffer: SampleBuffer) -> None:
        """Begin with none.

        Args:
            buffer: which says when a batch is there.
        """
        self._sampler = sampler
        self._make_program = make_program
        self._buffer = buffer
        self._prompts: dict[int, PromptBatch] = {}
        self._programs: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._metrics: Metrics = {}

    async def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, step: int
    ) -> Answered:
        """Admit prompts, and wait for a batch.

        Args:
            step: of the weights; see ``SampleBuffer.admit``.

        Raises:
            HybridRLError: of a program that sampled in the background.
            PhaseError: see ``SampleBuffer``.
        """
        if prompts is not None:
            self._admit(prompts, sampling, step=step)
        begin = time.perf_counter()
        while (batch := self._take(step=step)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._metrics = {
            "time/wait_for_groups_s": Max(time.perf_counter() - begin),
            "rollout/waiting_groups": Sum(self._buffer.num_complete),
            "rollout/open_groups": Sum(self._buffer.num_open),
        }
        return batch

    def take_metrics(self) -> Metrics:
        """Return the metrics of the last batch, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _admit(self, prompts: PromptBatch, sampling: SamplingParams, *, step: int) -> None:
        indices = prompts.prompt_index_P.tolist()
        self._buffer.admit(indices, step=step)
        self._prompts |= {index: prompts[[p]] for p, index in enumerate(indices)}
        size = sampling.num_responses_per_prompt
        collecting = _Collecting(size, self._complete, sampling.reporter)
        program = self._make_program(prompts, replace(sampling, reporter=collecting))
        self._start(program(self._sampler))

    def _start(self, program: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(program)
        self._programs.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._programs.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()
        self._changed.set()

    def _complete(self, index: int, samples: list[Sample]) -> None:
        self._buffer.complete(index, samples)
        self._changed.set()

    def _take(self, *, step: int) -> Answered | None:
        if self._error is not None:
            raise self._error
        groups = self._buffer.take(step=step)
        if groups is None:
            return None
        return Answered(
            concat_rows([self._prompts.pop(index) for index in groups]),
            [sample for samples in groups.values() for sample in samples],
        )
