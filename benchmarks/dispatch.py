"""What a call through the controller costs, beside raw Ray doing the same.

Prints two tables in Markdown: the empty call from 1 to 64 workers, and a batch of 256 MB there
and back at 1 and 2 ranks. Both ways alternate within one run, so that a busy machine slows both.

    python -m benchmarks.dispatch
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

import hybridrl.payload  # noqa: F401 - teaches the controller to carry tensors
from benchmarks.sides.measure import ROOT, in_turns, print_head, print_row
from hybridrl import env
from hybridrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)

Array = np.ndarray[Any, Any]

_ROWS = 2000
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Echo(Worker):
    """Does nothing, so that only the way there and back is measured."""

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Return at once."""

    @register(Dispatch.DP_COMPUTE)
    def echo(self, batch: Any) -> Any:  # noqa: ANN401
        """Return the batch."""
        return batch


class RawEcho:
    """The same as a plain Ray actor."""

    def nothing(self) -> None:
        """Return at once."""

    def echo(self, batch: Array) -> Array:
        """Return the batch."""
        return batch


def medians_of(ways: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    turns = in_turns(ways, num_rounds, num_warmup=2)
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


@contextmanager
def workers(size: int, num_cpus: float = 1.0) -> Iterator[tuple[list[Any], RayWorkerGroup]]:
    actor_class = ray.remote(RawEcho)
    actors = [actor_class.options(num_cpus=0.01).remote() for _ in range(size)]
    pool = RayResourcePool([size], num_cpus_per_rank=num_cpus)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Echo)) as group:
        yield actors, group
    for actor in actors:
        ray.kill(actor)


def raw_empty_call(actors: list[Any]) -> object:
    return ray.get([actor.nothing.remote() for actor in actors])


def raw_echo(actors: list[Any], array: Array) -> Array:
    """Send a slice to each raw actor and join what comes back."""
    pairs = zip(actors, np.split(array, len(actors)), strict=True)
    parts: list[Array] = ray.get([actor.echo.remote(part) for actor, part in pairs])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def empty_calls(sizes: Sequence[int], num_rounds: int) -> None:
    print("The empty call:\n")
    print_head("workers", "raw Ray, us", "hybridrl, us", "ratio", "us per worker", num_texts=0)
    for size in sizes:
        with workers(size, num_cpus=0.5) as (actors, group):
            ways = {"raw": partial(raw_empty_call, actors), "ours": partial(group.nothing)}
            seconds = medians_of(ways, max(min(50, num_rounds), num_rounds // size))
        raw, ours = seconds["raw"] * 1e6, seconds["ours"] * 1e6
        print_row(size, f"{raw:.0f}", f"{ours:.0f}", f"{ours / raw:.2f}", f"{ours / size:.0f}")


def batches(num_bytes: int, num_rounds: int) -> None:
    shape = (_ROWS, num_bytes // _ROWS // 4)
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    tensor = torch.from_numpy(array)
    batch = TensorDict({"observations": tensor}, [_ROWS])
    print(f"{num_bytes // 10**6} MB there and back:\n")
    print("| ranks | payload | raw Ray numpy, ms | hybridrl, ms | ratio |")
    print("|---:|---|---:|---:|---:|")
    for size in (1, 2):
        with workers(size) as (actors, group):
            sent = {"numpy": array, "torch tensor": tensor, "TensorDict": batch}
            ours = {name: partial(group.echo, payload) for name, payload in sent.items()}
            seconds = medians_of({"raw": partial(raw_echo, actors, array), **ours}, num_rounds)
        raw_s = seconds.pop("raw")
        for name, ours_s in seconds.items():
            times = (f"{raw_s * 1e3:.0f}", f"{ours_s * 1e3:.0f}", f"{ours_s / raw_s:.2f}")
            print_row(size, name, *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--empty-rounds", type=int, default=2000)
    parser.add_argument("--batch-rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="numbers of workers")
    parser.add_argument("--batch-mb", type=int, default=256)
    options = parser.parse_args()
    env.set_value("PYTHONPATH", str(ROOT))
    ray.init(
        address="local",
        num_cpus=80,
        include_dashboard=False,
        object_store_memory=3 * 10**9,
        log_to_driver=False,
        _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    )
    try:
        batches(options.batch_mb * 10**6, options.batch_rounds)
        print()
        empty_calls(options.sizes, options.empty_rounds)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
