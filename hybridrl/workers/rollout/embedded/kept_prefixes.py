"""Beginnings of contexts whose keys and values stay in free slots, for later turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first tokens of a context, whose keys and values lie in a slot."""

    slot: int
    num_tokens: int


class KeptPrefixes:
    """Knows which free slots hold keys and values that a later context may begin with."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tokens: dict[int, bytes] = {}
        """By slot: token ids, int64."""
        self._continued: set[int] = set()
        """Slots whose conversation continues in another slot."""

    def keep(self, slot: int, tokens: bytes) -> None:
        """Note that a free slot holds the keys and values of these tokens."""
        self._tokens[slot] = tokens
        self._continued.discard(slot)

    def find(self, context: bytes) -> CachedPrefix | None:
        """Return the longest beginning of a context that a slot holds; None: no slot does.

        Its slot is the first to be overwritten from now on.
        """
        lengths = [
            (len(tokens), slot)
            for slot, tokens in self._tokens.items()
            if context.startswith(tokens) and len(tokens) < len(context)
        ]
        if not lengths:
            return None
        num_bytes, slot = max(lengths)
        self._continued.add(slot)
        return CachedPrefix(slot, num_bytes // torch.int64.itemsize)

    def give_up(self, first_slot: int, end_slot: int) -> list[tuple[int, int, int]]:
        """Forget slots that responses take, and keep in other free slots what these held.

        Args:
            first_slot: of the slots that responses take.
            end_slot: the first slot behind them; it and all that follow are free.

        Returns:
            Moves to do at once: from slot, to slot, number of tokens. A slot is in one of them.
        """
        taken = range(first_slot, end_slot)
        tokens = {slot: self._tokens.pop(slot) for slot in taken if slot in self._tokens}
        needed = [slot for slot in tokens if slot not in self._continued]
        self._continued.difference_update(taken)
        if not needed:
            return []
        usable = [
            slot
            for slot in range(end_slot, self._num_slots)
            if slot not in self._tokens or slot in self._continued
        ]
        moves = list(zip(needed, usable, strict=False))
        for old, new in moves:
            self.keep(new, tokens[old])
        return [(old, new, len(tokens[old]) // torch.int64.itemsize) for old, new in moves]
