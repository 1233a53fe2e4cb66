"""Contexts and the engines that have them in their caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.images import Images
from hybridrl.sampler import response_keys

STAY = 8
"""A context stays with the engine that has its beginning in its cache, unless that engine has more
open responses than another by this number: elsewhere it would be prefilled again."""


class KnownPrefixes:
    """Compares tokens by sums of hashes, so no conversation is registered."""

    def __init__(self) -> None:
        self._engine_of: dict[tuple[int, int], int] = {}  # by number of tokens and sum
        self._lengths: set[int] = set()

    def add(self, sums_L: Tensor, engine: int) -> None:
        """Note who has the tokens of these ``prefix_sums``; the newest one counts."""
        self._lengths.add(len(sums_L))
        self._engine_of[len(sums_L), int(sums_L[-1])] = engine

    def find(self, sums_L: Tensor) -> int | None:
        """Return who has the longest known beginning of the tokens of these ``prefix_sums``."""
        lengths = sorted(length for length in self._lengths if length <= len(sums_L))
        sums = sums_L[torch.tensor(lengths, dtype=torch.int64) - 1].tolist()
        holder = None
        for known in zip(lengths, sums, strict=True):
            holder = self._engine_of.get(known, holder)
        return holder


def prefix_sums(token_ids: Sequence[int] | Tensor, images: Images = ()) -> Tensor:
    """Return, int64 [L], for each beginning of L tokens the sum of a hash of token and position.

    The first image counts as a token: later turns may add others, whose tokens are further behind.
    """
    tokens_L = torch.as_tensor(token_ids)
    sums_L = response_keys(tokens_L, torch.arange(len(tokens_L))).cumsum(0)
    return sums_L + images[0].identity if images else sums_L
