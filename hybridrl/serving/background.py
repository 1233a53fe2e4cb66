"""Sampling beside the trainer, over many updates of the weights, and when groups make a batch.

``SampleBuffer`` bounds their age before they are sampled: no row gets too old, none is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.batch import PromptBatch
from hybridrl.config.serving import OnUpdate
from hybridrl.errors import PhaseError, ServerDiedError
from hybridrl.loop_thread import LoopThread
from hybridrl.metrics import Max, Metrics, Sum, merge
from hybridrl.sampler import FinishedGroup, Program, Reporter, Sample, SamplingParams, T
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.finished_groups import FinishedGroups
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.requests import PolicyRequests
from hybridrl.serving.server import RolloutServer
from hybridrl.single_controller.payload import concat_rows
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.prefixes import KnownPrefixes
from hybridrl.workers.sharding.weight_files import AdaptedWeights

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
        """Begin empty."""
        self._num_prompts = num_prompts
        self._max_staleness = max_staleness
        self._steps: dict[int, int] = {}
        """At which each open group was admitted, in rising order."""
        self._samples: dict[int, tuple[Sample, ...]] = {}
        """Of the complete ones."""

    @property
    def num_open(self) -> int:
        """Groups that were admitted and not taken."""
        return len(self._steps)

    @property
    def num_complete(self) -> int:
        """Those of them that wait for a step."""
        return len(self._samples)

    @property
    def finished(self) -> FinishedGroups:
        """The groups that wait for a step."""
        return {i: FinishedGroup(self._steps[i], each) for i, each in self._samples.items()}

    def admit(
        self, indices: Sequence[int], *, step: int, finished: FinishedGroups | None = None
    ) -> None:
        """Open groups, which are sampled from now on; a PhaseError if too many are, or one twice.

        ``step`` is that of the weights: steps that were learned from before. It never falls.
        ``finished`` are those of them that need not be sampled: some of the groups that a run with
        the same numbers had open at ``step``, so the promise holds for them, too.
        """
        most = (self._max_staleness + 1) * self._num_prompts
        if len(self._steps) + len(indices) > most:
            raise PhaseError(
                f"{len(indices)} further groups were admitted while {len(self._steps)} are open: "
                f"with trainer.max_staleness={self._max_staleness} and "
                f"trainer.num_prompts_per_step={self._num_prompts} at most {most} may be open"
            )
        kept = {index: group for index, group in (finished or {}).items() if index in indices}
        steps = {index: step for index in indices} | {i: each.step for i, each in kept.items()}
        for index in sorted(indices, key=steps.__getitem__):
            if index in self._steps:
                raise PhaseError(f"prompt {index} was admitted twice")
            self._steps[index] = steps[index]
        self._samples |= {index: group.samples for index, group in kept.items()}

    def complete(self, index: int, samples: Sequence[Sample]) -> None:
        """Note the responses to a prompt; a PhaseError if its group is not open, or complete."""
        if index not in self._steps or index in self._samples:
            raise PhaseError(f"the group of prompt {index} is not open, and has responses")
        self._samples[index] = tuple(samples)

    def take(self, *, step: int) -> dict[int, tuple[Sample, ...]] | None:
        """Return the P oldest complete groups by prompt, for this step; None: not yet."""
        oldest = [index for index in self._steps if index in self._samples]
        chosen = dict.fromkeys(oldest[: self._num_prompts])
        if len(chosen) < self._num_prompts:
            return None
        stay = [admitted for index, admitted in self._steps.items() if index not in chosen]
        for rank, admitted in enumerate(stay, start=1):
            if rank > (admitted + self._max_staleness - step) * self._num_prompts:
                return None
        for index in chosen:
            del self._steps[index]
        return {index: self._samples.pop(index) for index in chosen}


_NONE_CUT: Mapping[OnUpdate, Metrics] = {
    "interrupt": {"rollout/interrupted_responses": Sum(0), "rollout/interrupted_tokens": Sum(0)},
    "abort": {"rollout/aborted_responses": Sum(0), "rollout/aborted_tokens": Sum(0)},
    "finish": {},
}
"""So that each step has them; the pool mentions only those that there were."""


class BackgroundSampling:
    """One pool of engines, and programs that sample with it over many versions of the weights.

    ``updating`` brings all open requests to an end or to a token; programs wait meanwhile.
    """

    def __init__(
        self,
        server: RolloutServer,
        pool: EnginePool,
        make_program: MakeProgram,
        buffer: SampleBuffer,
        *,
        requests: PolicyRequests,
        recovery: Recovery,
        on_update: OnUpdate,
    ) -> None:
        """Sample nothing yet; engines join after each update. ``buffer`` knows open groups."""
        pool.drops_interrupted = on_update == "abort"
        self._server = server
        self._pool = pool
        self._make_program = make_program
        self._buffer = buffer
        self._requests = requests
        self._recovery = recovery
        self._on_update = on_update
        self._loop = LoopThread("background sampling")
        self._phase = ExitStack()
        self._is_ending = False
        self._metrics: Metrics = {}
        self._prompts: dict[int, PromptBatch] = {}
        self._kept: FinishedGroups = {}
        self._programs: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._held: Sequence[Program[list[Sample]]] = ()
        """Of an evaluation, which the next exchange begins."""
        self._evaluation: asyncio.Future[list[list[Sample]]] | None = None

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Let no request be open in the block, which loads the weights of ``version``.

        After an error nothing is sampled until the next update succeeds.
        """
        self._require_no_evaluation()
        begin = time.perf_counter()
        self._phase.close()
        yield
        with ExitStack() as opened:
            self._open(opened, version)
            self._phase = opened.pop_all()
        seconds: Metrics = {"time/update_engines_s": Max(time.perf_counter() - begin)}
        self._metrics = merge([self._metrics, seconds])

    def add_adapter(self, source: AdaptedWeights, *, version: int, most: int) -> bool:
        """Let requests use another adapter from here on; open ones keep theirs, and nothing waits.

        One that no request uses any more is unloaded with the next one that comes. False, and
        nothing is done: no engine serves, or with this one it would have more than ``most``.
        """
        self._require_no_evaluation()
        before = self._server.serving_engines()
        if self._server.version < 0 or not before:
            return False
        kept = self._look(lambda: self._pool.open_versions) | {self._server.version}
        if len(kept) >= most:
            return False
        try:
            with self._server.adding_adapter(source, version=version, kept=kept) as engines:
                self._loop.run(self._turn_to(version, engines))
        finally:
            left = self._server.serving_engines()
            for index in before.keys() - left.keys():
                self._pool.drop(index, before[index], "it did not load an adapter")
            self._recovery.replace_lost()
        self._metrics = merge([self._metrics, {"time/update_engines_s": Max(0.0)}])
        return True

    def _require_no_evaluation(self) -> None:
        if self._evaluation is not None:
            raise PhaseError("an evaluation is open, and new weights would continue it")

    def _look(self, read: Callable[[], T]) -> T:
        """Read in the loop, which changes what is read."""

        async def look() -> T:
            return read()

        return self._loop.run(look())

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, step: int
    ) -> tuple[Answered, Metrics]:
        """Admit prompts, and wait for a batch; raises the error of a program behind it.

        ``step`` is that of the weights; see ``SampleBuffer.admit``.
        """
        try:
            answered, metrics = self._loop.run(self._exchange(prompts, sampling, step))
        except CancelledError as error:
            raise ServerDiedError("the rollout manager ended before a batch was there") from error
        before, self._metrics = self._metrics, {}
        return answered, merge([before, _NONE_CUT[self._on_update], metrics])

    def run(self, program: Program[T]) -> T:
        """Run a program beside the open groups, with the weights of the last update."""
        return self._loop.run(program(self._pool))

    def begin_evaluation(self, programs: Sequence[Program[list[Sample]]]) -> None:
        """Let the next exchange begin programs, which sample with its weights alone."""
        self._held = programs

    def end_evaluation(self) -> list[list[Sample]]:
        """Wait for the samples of each program, before the next ``updating``; raises its error."""

        async def wait() -> list[list[Sample]]:
            if self._evaluation is None:
                raise PhaseError("no exchange came since the evaluation began")
            return await self._evaluation

        try:
            return self._loop.run(wait())
        except CancelledError as error:
            raise ServerDiedError("the rollout manager ended within an evaluation") from error
        finally:
            self._evaluation = None

    def finished_groups(self) -> FinishedGroups:
        """Return the groups that wait for a step, for a checkpoint."""
        return self._look(lambda: self._buffer.finished)

    def keep_groups(self, groups: FinishedGroups) -> None:
        """Take groups of a checkpoint: prompts of the next exchange that have one are finished."""
        self._kept = groups

    def end(self) -> None:
        """End all programs. Idempotent; before the end of the server."""
        self._is_ending = True
        self._loop.cancel_all()  # so no request is open
        self._phase.close()
        self._loop.end()

    # -- open groups, in the loop ----------------------------------------------------------------

    async def _exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, step: int
    ) -> tuple[Answered, Metrics]:
        if self._held:  # before new groups: they need not end within the step
            programs, self._held = self._held, ()
            self._evaluation = asyncio.gather(*(program(self._pool) for program in programs))
        if prompts is not None:
            self._admit(prompts, sampling, step=step)
        begin = time.perf_counter()
        while (batch := self._take(step=step)) is None:
            self._changed.clear()
            await self._changed.wait()
        metrics: Metrics = {
            "time/wait_for_groups_s": Max(time.perf_counter() - begin),
            "rollout/waiting_groups": Sum(self._buffer.num_complete),
            "rollout/open_groups": Sum(self._buffer.num_open),
        }
        return batch, merge([self._pool.take_metrics(), metrics])

    def _admit(self, prompts: PromptBatch, sampling: SamplingParams, *, step: int) -> None:
        indices = prompts.prompt_index_P.tolist()
        # In later exchanges they might come too late, or hold others up.
        finished, self._kept = self._kept, {}
        self._buffer.admit(indices, step=step, finished=finished)
        self._prompts |= {index: prompts[[p]] for p, index in enumerate(indices)}
        missing = [p for p, index in enumerate(indices) if index not in finished]
        if not missing:
            return
        prompts = prompts[missing]
        size = sampling.num_responses_per_prompt
        collecting = _Collecting(size, self._complete, sampling.reporter)
        program = self._make_program(prompts, replace(sampling, reporter=collecting))
        task = asyncio.ensure_future(program(self._pool))
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

    # -- between two updates ---------------------------------------------------------------------

    def _open(self, opened: ExitStack, version: int) -> None:
        engines = self._server.serving_engines()
        way = self._requests.open(self._pool, engines.values(), version=version)
        self._pool.ask = self._loop.run(way.__aenter__())
        opened.callback(lambda: self._loop.run(way.__aexit__(None, None, None)))
        self._join(version, engines)
        opened.enter_context(self._recovery.monitor.watching())
        opened.callback(lambda: self._loop.run(self._stop()))
        # First of all: an engine that comes while others stop waits for the next phase.
        opened.enter_context(self._recovery.filling(self._pool))

    async def _turn_to(self, version: int, engines: Mapping[int, EngineHandle]) -> None:
        self._pool.ask = self._requests.begin_phase()
        self._join(version, engines)
        await asyncio.sleep(0)  # engines join in the next turn of the loop

    def _join(self, version: int, engines: Mapping[int, EngineHandle]) -> None:
        if self._pool.prefixes is not None:
            self._pool.prefixes = KnownPrefixes()  # no cache has any of the new weights
        for index, engine in engines.items():
            self._pool.join(index, engine, version=version)

    async def _stop(self) -> None:
        """Send no more requests, and wait until none is open."""
        engines = self._server.serving_engines()
        for index in engines:
            self._pool.suspend(index)
        await asyncio.sleep(0)  # a suspension takes effect in the next turn of the loop
        if self._on_update != "finish" and not self._is_ending:
            await self._requests.interrupt(engines.values())
        await self._pool.drained()
