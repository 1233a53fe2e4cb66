"""The rule by which a step gets its groups; stands in for hybridrl's own buffer."""

from __future__ import annotations

from collections.abc import Sequence


class GroupBuffer:
    """Open groups in the order of their admission; no step gets one that is too old.

    A group that is admitted at step v must be trained at step v + K at the latest. A step takes the
    P oldest complete groups as soon as all others can still be trained in time: the r-th oldest of
    them must be due no earlier than r / P steps from now.
    """

    def __init__(self, *, num_prompts: int, max_staleness: int) -> None:
        """Begin empty, with P and K."""
        self._num_prompts = num_prompts
        self._max_staleness = max_staleness
        self._last_steps: dict[int, int] = {}
        self._complete: set[int] = set()

    def admit(self, indices: Sequence[int], *, step: int) -> None:
        """Open groups at a step."""
        self._last_steps |= dict.fromkeys(indices, step + self._max_staleness)

    def complete(self, index: int, samples: Sequence[object]) -> None:
        """Note that the responses to a prompt have ended."""
        self._complete.add(index)

    def take(self, *, step: int) -> list[int] | None:
        """Return the groups of a step, oldest first; None: not yet."""
        if len(self._complete) < self._num_prompts:
            return None
        chosen = sorted(self._complete)[: self._num_prompts]
        chosen_set = set(chosen)
        staying = [last for index, last in self._last_steps.items() if index not in chosen_set]
        ranks = enumerate(staying, start=1)
        if any(rank > (last - step) * self._num_prompts for rank, last in ranks):
            return None
        self._complete.difference_update(chosen)
        for index in chosen:
            del self._last_steps[index]
        return chosen
