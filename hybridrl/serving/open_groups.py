"""Groups of responses that are sampled in the background, and when they make a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.batch import PromptBatch
from hybridrl.errors import PhaseError
from hybridrl.metrics import Max, Metrics, Sum
from hybridrl.sampler import Program, Reporter, Sample, Sampler, SamplingParams
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


@dataclass(slots=True)
class _Group:
    """The responses to one prompt."""

    last_step: int
    """The last step that may learn from it."""

    samples: tuple[Sample, ...] | None = None
    """None while it is sampled."""


class SampleBuffer:
    """Open groups in the order in which they were admitted; no step gets one that is too old.

    Let K be ``max_staleness`` and P ``num_prompts``. A group that is admitted at step v may be
    taken until step v + K. Two rules keep that promise, and drop nothing:

    - at most (K + 1) P groups are open, and
    - ``take`` gives the P oldest complete groups only if every other open group still has its turn:
      the r-th oldest of those that stay must be due no earlier than r / P steps from now.

    *No group is late.* The second rule says that after the take of step w at most j P open groups
    are due by w + j, for each j >= 0. So at step w + 1 at most (j + 1) P are due by (w + 1) + j;
    for j = K the first rule says so, which covers those admitted since. *A take never waits for
    ever.* By that count, a take of the P oldest groups leaves at most j P due by w + j. So the
    second rule holds as soon as these P are complete, and often before. This is
    earliest-deadline-first: groups are in the order of their deadlines.
    """

    def __init__(self, *, num_prompts: int, max_staleness: int) -> None:
        """Begin empty.

        Args:
            num_prompts: P, groups of a batch.
            max_staleness: K, in steps.
        """
        self._num_prompts = num_prompts
        self._max_staleness = max_staleness
        self._groups: dict[int, _Group] = {}

    @property
    def num_open(self) -> int:
        """Groups that were admitted and not taken."""
        return len(self._groups)

    @property
    def num_complete(self) -> int:
        """Those of them that wait for a step."""
        return sum(group.samples is not None for group in self._groups.values())

    def admit(self, indices: Sequence[int], *, step: int) -> None:
        """Open groups, which are sampled from now on.

        Args:
            step: of the weights: steps that were learned from before. It never falls.

        Raises:
            PhaseError: more would be open than can be learned from in time; or one is open already.
        """
        most = (self._max_staleness + 1) * self._num_prompts
        if len(self._groups) + len(indices) > most:
            raise PhaseError(
                f"{len(indices)} further groups were admitted while {len(self._groups)} are open: "
                f"with trainer.max_staleness={self._max_staleness} and "
                f"trainer.num_prompts_per_step={self._num_prompts} at most {most} may be open"
            )
        for index in indices:
            if index in self._groups:
                raise PhaseError(f"prompt {index} was admitted twice")
            self._groups[index] = _Group(step + self._max_staleness)

    def complete(self, index: int, samples: Sequence[Sample]) -> None:
        """Note the responses to a prompt.

        Raises:
            PhaseError: its group is not open, or complete already.
        """
        group = self._groups.get(index)
        if group is None or group.samples is not None:
            raise PhaseError(f"the group of prompt {index} is not open, and has responses")
        group.samples = tuple(samples)

    def take(self, *, step: int) -> dict[int, tuple[Sample, ...]] | None:
        """Return the P oldest complete groups by prompt, oldest first; None: not yet.

        Args:
            step: that learns from them; see ``admit``.
        """
        oldest = [index for index, group in self._groups.items() if group.samples is not None]
        chosen = dict.fromkeys(oldest[: self._num_prompts])
        if len(chosen) < self._num_prompts:
            return None
        stay = [group for index, group in self._groups.items() if index not in chosen]
        for rank, group in enumerate(stay, start=1):
            if rank > (group.last_step - step) * self._num_prompts:
                return None
        return {index: self._groups.pop(index).samples or () for index in chosen}
