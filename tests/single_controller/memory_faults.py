"""A Ray of its own, short of memory or of a place for objects; prints what a driver sees."""

# ruff: noqa: T201

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import ray

from hybridrl.errors import HybridRLError
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)

_MIB = 1024 * 1024


class Hungry(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def fill(self, size_mib: int) -> int:
        self.kept = np.ones(size_mib * _MIB, dtype=np.uint8)
        while True:  # until the memory monitor looks
            self.kept += 1

    @register(Dispatch.ONE_TO_ALL)
    def size(self, rows: Any) -> int:
        return len(rows)

    @register(Dispatch.ONE_TO_ALL)
    def make(self, size_mib: int) -> Any:
        return np.ones(size_mib * _MIB, dtype=np.uint8)


def main(case: str) -> None:
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * _MIB,
    )
    try:
        with RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Hungry)) as group:
            if case == "memory":
                group.fill(200)
            elif case == "argument":
                group.size(np.ones(200 * _MIB, dtype=np.uint8))
            elif case == "result":
                group.make(200)
            else:
                print(group.size(np.ones(200 * _MIB, dtype=np.uint8)))
    except HybridRLError as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
