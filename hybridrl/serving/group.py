"""A group of equal engines: slots, and the processes in them. It orders nothing and never waits."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from hybridrl.errors import EngineError
from hybridrl.serving.engine_handle import EngineHandle, Launch
from hybridrl.serving.plan import GroupPlan
from hybridrl.workers.sharding.lifecycle import Action

Futures = dict[int, Future[Any]]
"""Calls in flight, by slot."""


class ServerGroup:
    """Slots for the engines of a plan. An empty slot had an engine that died, or none yet."""

    def __init__(self, plan: GroupPlan, launch: Launch) -> None:
        """Start nothing yet.

        Args:
            plan: of the group; a placeholder has no slots.
        """
        self.plan = plan
        self._launch = launch
        self._slots: list[EngineHandle | None] = [None] * len(plan.engines)
        self._starts: Futures = {}

    def start(self, slots: Collection[int] | None = None) -> Futures:
        """Start engines in empty slots, without waiting; others are left alone.

        Args:
            slots: those to look at; None: all.

        Returns:
            The futures of these engines, and of those that earlier calls started and that did not
            start yet.
        """
        empty = [slot for slot in self._chosen(slots) if self._slots[slot] is None]
        for slot in empty:
            handle = self._slots[slot] = self._launch(self.plan, self.plan.engines[slot])
            self._starts[slot] = handle.build()
        return {
            slot: self._starts[slot]
            for slot in self._chosen(slots)
            if slot in empty or not _has_succeeded(self._starts[slot])
        }

    def _chosen(self, slots: Collection[int] | None) -> Collection[int]:
        return range(len(self._slots)) if slots is None else slots

    def act(self, action: Action, *, slots: Collection[int]) -> Futures:
        """Begin one edge of the life cycle on the engines in ``slots``."""
        return {slot: self.engine(slot).act(action) for slot in slots}

    def engine(self, slot: int) -> EngineHandle:
        """Return the engine in a slot.

        Raises:
            EngineError: the slot is empty.
        """
        handle = self._slots[slot]
        if handle is None:
            raise EngineError(f"engine {slot} of group {self.plan.name} is gone; recover it first")
        return handle

    def find_dead(self) -> list[int]:
        """Return the slots whose engines are gone."""
        return [
            slot
            for slot, handle in enumerate(self._slots)
            if handle is None or not handle.is_alive()
        ]

    def clear(self, slots: Collection[int]) -> None:
        """End the engines in ``slots``, if they live, and empty the slots."""
        for slot in slots:
            handle, self._slots[slot] = self._slots[slot], None
            self._starts.pop(slot, None)
            if handle is not None:
                handle.end()


def _has_succeeded(start: Future[None]) -> bool:
    return start.done() and start.exception() is None
