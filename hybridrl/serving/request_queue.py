"""Requests that wait for engines: the oldest request gets the engine with the fewest responses."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.workers.rollout.prefixes import STAY

_ENTRIES_PER_ENGINE = 8
"""Entries of the heap, at most, before those of earlier counts are dropped."""


@dataclass(eq=False, slots=True)
class Member:
    """An engine of the pool."""

    index: int
    handle: EngineHandle
    version: int
    """Of its weights."""

    num_open: int = 0
    """Responses that it was asked for and did not give yet."""
    losses: set[asyncio.Future[str]] = field(default_factory=set)
    """One of each open request, which gets the reason if the engine is lost meanwhile."""

    num_pauses: int = 0
    """Times that it was suspended."""


class RequestQueue:
    """Hands engines with room to requests; for one event loop.

    A change costs the same with any number of engines (but for a logarithm) and of requests that
    wait: it wakes those alone that get an engine.
    """

    def __init__(self, *, num_slots: int) -> None:
        """Begin without engines; ``num_slots`` responses decode at the same time on each."""
        self._num_slots = num_slots
        self._members: set[Member] = set()
        self._by_load: list[tuple[int, int, Member]] = []
        """Heap of open responses, number of the entry, and engine; entries of earlier counts are
        skipped."""
        self._number = count()
        self._waiting: deque[tuple[int, asyncio.Future[Member], Member | None]] = deque()
        """Requests without an engine, oldest first: responses, what they wait for, and the engine
        that has the context in its cache."""

    def add(self, member: Member) -> None:
        """Hand out this engine, too."""
        self._members.add(member)
        self._note(member)
        self._hand_out()

    def remove(self, member: Member) -> None:
        """Hand it out no more; requests that have it give it back all the same. Idempotent."""
        self._members.discard(member)

    async def take(self, num_responses: int, *, holder: Member | None = None) -> Member:
        """Wait for an engine with room, and return the one with the fewest open responses.

        Args:
            holder: has the context in its cache; returned if it has room and at most ``STAY`` open
                responses more.

        Raises:
            HybridRLError: that of ``refuse``.
        """
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_responses, future, holder))
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:  # it came just before
                self.give_back(future.result(), num_responses)
            raise

    def give_back(self, member: Member, num_responses: int) -> None:
        """Note that responses of an engine are open no more."""
        member.num_open -= num_responses
        self._note(member)
        self._hand_out()

    def refuse(self, error: Exception) -> None:
        """Let all requests that wait fail: no engine will come."""
        while self._waiting:
            _, future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _hand_out(self) -> None:
        while self._waiting and (freest := self._freest()) is not None:
            num_responses, future, holder = self._waiting.popleft()
            if not future.done():  # else its request was cancelled
                member = holder if holder and self._may_stay(holder, freest) else freest
                member.num_open += num_responses
                self._note(member)
                future.set_result(member)

    def _may_stay(self, holder: Member, freest: Member) -> bool:
        has_room = holder in self._members and holder.num_open < self._num_slots
        return has_room and holder.num_open - freest.num_open <= STAY

    def _freest(self) -> Member | None:
        """Return the engine with the fewest open responses; None if none has room."""
        while self._by_load:
            load, _, member = self._by_load[0]
            if member in self._members and load == member.num_open:
                return member if load < self._num_slots else None
            heappop(self._by_load)
        return None

    def _note(self, member: Member) -> None:
        heappush(self._by_load, (member.num_open, next(self._number), member))
        if len(self._by_load) > _ENTRIES_PER_ENGINE * (len(self._members) + 1):
            self._by_load = [(each.num_open, next(self._number), each) for each in self._members]
            heapify(self._by_load)
