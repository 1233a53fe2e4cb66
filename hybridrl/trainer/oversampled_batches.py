"""Batches of the groups that are complete first, while more prompts are open than a step needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hybridrl.data.source import PromptSource
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import Sampled
from hybridrl.trainer.policy import Generates


class OversampledBatches:
    """Keeps ``num_open`` prompts open, and learns from those whose responses end first.

    An open prompt stays with the engine that began it, whose rank keeps the tokens of its
    responses. Each engine gets its prompts oldest first, and completes its share of the batch. No
    more prompts are open than the steps that are left will learn from.
    """

    def __init__(
        self,
        source: PromptSource,
        engines: Generates,
        *,
        num_prompts: int,
        num_open: int,
        num_engines: int,
        num_steps: int,
    ) -> None:
        """Draw nothing yet.

        Args:
            source: of the prompts; it knows those that are open.
            engines: that sample; each gets an equal share of a call's prompts, in order.
            num_prompts: P, prompts of a batch; a multiple of ``num_engines``.
            num_open: prompts of a call, >= P; a multiple of ``num_engines``.
        """
        self._source = source
        self._engines = engines
        self._num_prompts = num_prompts
        self._num_open = num_open
        self._num_engines = num_engines
        self._num_steps = num_steps
        self._step = 1
        self._engine_of: dict[int, int] = {}
        """The engine of each open prompt, by the prompt's index."""

    def begin(self, step: int) -> None:
        """Begin a step: it says how many are left."""
        self._step = step

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Let engines continue open prompts and begin drawn ones, until a batch is complete."""
        is_open = self._source.open
        wanted = min(self._num_open, (self._num_steps - self._step + 1) * self._num_prompts)
        if wanted > len(is_open):
            is_open.add(self._source.next(wanted - len(is_open)))
        enough = replace(sampling, num_complete=self._num_prompts // self._num_engines)
        rollouts = self._engines.generate(is_open.of(self._deal()).prompts, enough)
        size = sampling.num_responses_per_prompt
        return Sampled(is_open.take(rollouts.prompt_index_B[::size].tolist()), rollouts)

    def _deal(self) -> list[int]:
        """Return the open prompts, engine by engine, oldest first; new ones fill the shares."""
        indices = self._source.open.indices
        self._engine_of = {i: self._engine_of[i] for i in indices if i in self._engine_of}
        loads = Counter(self._engine_of.values())
        for index in indices:
            if index not in self._engine_of:
                engine = min(range(self._num_engines), key=lambda engine: loads[engine])
                self._engine_of[index] = engine
                loads[engine] += 1
        return sorted(indices, key=lambda index: (self._engine_of[index], index))
