"""A sequence of tokens while it grows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.agents.trajectory import TokenSequence, Turn
from hybridrl.agents.turn_records import CallRecord


class OpenSequence:
    """A sequence while it grows: a context, and turns behind it."""

    def __init__(self, context: Tensor) -> None:
        """Begin behind a context, int64 [n], n >= 1."""
        self.context = context
        self.token_ids = context
        """int64 [n], of the context and all turns: the next request's context."""
        self.turns: list[Turn] = []
        self._calls: defaultdict[int, list[CallRecord]] = defaultdict(list)
        """By index of the turn behind which they were made."""

    def calls_behind_last_turn(self) -> list[CallRecord]:
        """Return the calls that were made since the last turn, to be added to."""
        return self._calls[len(self.turns) - 1]

    def add(self, turn: Turn) -> None:
        """Append a turn."""
        self.turns.append(turn)
        self.token_ids = torch.cat([self.token_ids, turn.token_ids])

    def close(self) -> TokenSequence | None:
        """Return it without tokens behind the last sampled turn; None if nothing was sampled."""
        turns = [
            replace(turn, calls=tuple(self._calls[index])) if index in self._calls else turn
            for index, turn in enumerate(self.turns)
        ]
        while turns and turns[-1].logprobs is None:
            turns.pop()
        return TokenSequence(self.context, tuple(turns)) if turns else None
