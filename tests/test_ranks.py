from __future__ import annotations

import os
import signal
import time

import psutil
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


def _rank_zero_hangs(rank: int) -> None:
    if rank == 0:
        time.sleep(600)


def test_each_rank_answers_and_one_that_fails_or_is_killed_is_named() -> None:
    for offset in (0.0, 1.0):
        sums = run_ranks(2, _sum_of_ranks, offset)
        assert [s.item() for s in sums] == [1.0 + 2 * offset] * 2
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed:.*_rank_one_raises.*is unhappy"):
        run_ranks(2, _rank_one_raises)
    with pytest.raises(RankFailed, match="rank 1 died: exit code -9"):
        run_ranks(2, _rank_one_is_killed)


def test_a_late_rank_is_named_and_no_process_is_left() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks \[0\] did not answer within 2.0 s"):
        run_ranks(2, _rank_zero_hangs, deadline_s=2.0)
    assert time.monotonic() - started < 120
    left = [
        child
        for server in psutil.Process().children()
        for child in server.children()
        if child.status() != psutil.STATUS_ZOMBIE and "forkserver" in " ".join(server.cmdline())
    ]
    assert left == []
