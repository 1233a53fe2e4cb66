"""Prompts that were drawn and whose responses no step has learned from yet."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.data.prompt_step import PromptStep
from hybridrl.errors import PhaseError


class OpenPrompts:
    """Open prompts by their index in the stream.

    Engines sample responses to them while the trainer learns from others. A checkpoint holds the
    indices, and the run that resumes draws the same rows again: so no prompt is lost or doubled.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._by_index: dict[int, PromptStep] = {}

    def __len__(self) -> int:
        return len(self._by_index)

    @property
    def indices(self) -> tuple[int, ...]:
        """In rising order."""
        return tuple(sorted(self._by_index))

    def add(self, task: PromptStep) -> None:
        """Note prompts that were drawn.

        Raises:
            PhaseError: one is open already.
        """
        for position, index in enumerate(task.prompts.prompt_index_P.tolist()):
            if index in self._by_index:
                raise PhaseError(f"prompt {index} was drawn twice: it is open already")
            only = PromptStep(task.prompts[[position]], (task.rows[position],))
            self._by_index[index] = only

    def of(self, indices: Sequence[int]) -> PromptStep:
        """Return open prompts, at least one, in this order; they stay open."""
        return PromptStep.join([self._by_index[index] for index in indices])

    def take(self, indices: Sequence[int]) -> PromptStep:
        """Return prompts whose responses are there, in this order; they are open no more.

        Raises:
            PhaseError: one is not open: its responses came twice, or belong to another run.
        """
        unknown = [index for index in indices if index not in self._by_index]
        if unknown or len(set(indices)) < len(indices):
            raise PhaseError(
                f"the rollout engines gave responses to prompts {list(indices)}; of these "
                f"{unknown or 'some'} are not open, or come twice"
            )
        return PromptStep.join([self._by_index.pop(index) for index in indices])

    def clear(self) -> None:
        """Forget all: a checkpoint is restored."""
        self._by_index.clear()
