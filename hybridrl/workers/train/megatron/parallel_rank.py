"""A rank's place among those that share a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRank:
    """A rank's place among those that share a layer; pipeline ranks differ in layer numbers."""

    tp_rank: int = 0
    """Among tensor-parallel ranks."""

    tp_size: int = 1

    ep_rank: int = 0
    """Among expert-parallel ranks."""

    ep_size: int = 1

    etp_rank: int = 0
    """Among the ranks that share the matrices of one expert."""

    etp_size: int = 1
