"""Workers on which things go wrong: ranks that hang, raise and die, alone and in a collective."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.diagnostics import activity
from hybridrl.single_controller import Dispatch, Worker, register


class Mortal(Worker):
    """Dies or hangs where it is told to; needs no process group."""

    def __init__(self, place: str = "", rank: int = 0, *, hangs: bool = False) -> None:
        self._place = place
        self._victim = rank
        self._hangs = hangs
        self._meet_fate("construction")

    def _meet_fate(self, place: str) -> None:
        if place == self._place and self.rank == self._victim:
            if self._hangs:
                hang_here()
            os._exit(5)

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def nap(self) -> None:
        time.sleep(600)

    def close(self) -> None:
        self._meet_fate("close")


class Joined(Worker):
    def __init__(self, collective_timeout_s: float) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=collective_timeout_s))
        self._reduce()  # opens the connections, which takes time

    def _reduce(self) -> float:
        total = torch.ones(1)
        with activity.scope("all_reduce", waits=True):
            dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL, timeout_s=3.0)
    def hang_on(self, rank: int) -> float:
        if self.rank == rank:
            hang_here()
        return self._reduce()

    @register(Dispatch.ONE_TO_ALL)
    def hang_long_on(self, rank: int) -> float:
        if self.rank == rank:
            hang_here()
        return self._reduce()

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int) -> float:
        """The first to raise leaves the group, which breaks the collective of the others."""
        if self.rank == rank:
            dist.destroy_process_group()
            raise ArithmeticError("no sum today")
        return self._reduce()


def hang_here() -> None:
    while True:
        pass
