from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks


def _sum_of_ranks(rank: int, offset: float) -> torch.Tensor:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return total


def _rank_one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def _rank_one_is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_each_rank_answers_and_one_that_fails_or_is_killed_is_named() -> None:
    for offset in (0.0, 1.0):
        sums = run_ranks(2, _sum_of_ranks, offset)
        assert [s.item() for s in sums] == [1.0 + 2 * offset] * 2
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed:.*_rank_one_raises.*is unhappy"):
        run_ranks(2, _rank_one_raises)
    with pytest.raises(RankFailed, match="rank 1 died: exit code -9"):
        run_ranks(2, _rank_one_is_killed)
