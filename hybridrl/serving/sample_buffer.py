"""Groups between the start of their sampling and the step that learns from them: a pure state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import PhaseError
from hybridrl.sampler import Sample


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
