"""Workers that the tests run on real ranks. They import no torch, so they start at once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import numpy as np
import ray

from hybridrl.single_controller import Dispatch, Execute, Worker, dispatch_by_mesh, register

DOUBLED = Dispatch(
    name="DOUBLED",
    split=lambda layout, value: [value * 2] * layout.world_size,
    collect=lambda layout, results: sum(results),
)


class Scaler(Worker):
    def __init__(self, factor: float = 1.0, *, fail_on_rank: int | None = None) -> None:
        if self.rank == fail_on_rank:
            raise ValueError(f"no factor {factor} here")
        self.factor = factor

    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict[str, Any]:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "FLAVOUR"]
        names += ["OMP_NUM_THREADS"]
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "env": {name: os.environ.get(name) for name in names},
        }

    @register(Dispatch.DP_COMPUTE)
    def scale(self, rows: Any, *, by: float = 1.0) -> Any:
        return rows * self.factor * by

    @register(Dispatch.DP_COMPUTE, blocking=False)
    def scale_later(self, rows: Any, delay_s: float = 0.0) -> Any:
        time.sleep(delay_s)
        return rows * self.factor

    @register(Dispatch.DP_COMPUTE_PROTO)
    def answer_twice(self, rows: Any) -> Any:
        return np.repeat(rows, 2, axis=0)

    @register(Dispatch.DP_COMPUTE, pad=True, blocking=False)
    def answer_twice_later(self, rows: Any) -> Any:
        return np.repeat(rows, 2, axis=0)

    @register(Dispatch.ALL_TO_ALL)
    def add_rank(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.ALL_TO_ALL, blocking=False)
    def add_rank_later(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def on_rank_zero(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(Dispatch.RANK_ZERO, blocking=False)
    def seed(self) -> int:
        return 7

    @register(Dispatch.ONE_TO_ALL)
    def take_whole(self, value: Any) -> Any:
        return value

    @register(DOUBLED)
    def own_dispatch(self, value: int) -> int:
        return value

    @register(Dispatch.ONE_TO_ALL)
    def set_up_mesh(self, tensor_parallel_size: int) -> None:
        dp_size = self.world_size // tensor_parallel_size
        dp_rank, tp_rank = divmod(self.rank, tensor_parallel_size)
        self.register_mesh("rollout", dp_rank=dp_rank, dp_size=dp_size, is_output_rank=tp_rank == 0)

    @register(dispatch_by_mesh("rollout"))
    def generate(self, rows: Any) -> Any:
        return rows + 100 * self.rank

    @register(dispatch_by_mesh("never registered"))
    def on_unknown_mesh(self, rows: Any) -> Any:
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError(f"rank {rank} is unhappy")
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def raise_while_others_wait(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError(f"rank {rank} is unhappy")
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL, timeout_s=3.0)
    def hang_on_both(self) -> None:
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def return_lock(self) -> Any:
        return threading.Lock()

    def not_registered(self, value: int) -> int:
        return value + self.rank


class Napper(Worker):
    """Two naps at once take as long as one, because they are coroutines."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self, other: str, me: str) -> str:
        met = self.__dict__.setdefault("met", {})
        met[me] = True
        while other not in met:  # returns only if both calls run at the same time
            await asyncio.sleep(0.01)
        return me


class Actor(Worker):
    def __init__(self, version: int) -> None:
        self.version = version

    @register(Dispatch.ONE_TO_ALL)
    def update(self) -> int:
        self.version += 1
        return self.version

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Critic(Worker):
    def __init__(self) -> None:
        self.actor_was_there = "actor" in self.fused

    @register(Dispatch.ONE_TO_ALL)
    def read_actor(self) -> tuple[bool, int]:
        actor = self.fused["actor"]
        assert isinstance(actor, Actor)
        return self.actor_was_there, actor.version

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Closing(Worker):
    def __init__(self, path: str) -> None:
        self.path = path

    def close(self) -> None:
        with open(f"{self.path}.{self.rank}", "w") as file:
            file.write("closed")
