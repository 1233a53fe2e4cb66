"""What a call through the controller costs, beside raw Ray doing the same.

Prints two tables in Markdown: the empty call from 1 to 64 workers, and a batch of 256 MB there
and back at 1 and 2 ranks. Both ways alternate within one run, so that a busy machine slows both.

    python -m benchmarks.dispatch
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

import hybridrl.payload  # noqa: F401 - teaches the controller to carry tensors
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


def alternate(ways: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return the median seconds of each way; each round does every way once, in turned order."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(num_rounds + 2):
        names = list(ways) if round_index % 2 else list(ways)[::-1]
        for name in names:
            started = time.perf_counter()
            result = ways[name]()
            seconds[name].append(time.perf_counter() - started)
            del result  # give the shared memory back before the next way needs it
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}  # 2 warm up


def raw_actors(size: int) -> list[Any]:
    """Start plain Ray actors."""
    actor_class = ray.remote(RawEcho)
    return [actor_class.options(num_cpus=0.01).remote() for _ in range(size)]


def raw_empty_call(actors: list[Any]) -> object:
    """Call raw actors without arguments."""
    return ray.get([actor.nothing.remote() for actor in actors])


def raw_echo(actors: list[Any], array: Array) -> Array:
    """Send a slice to each raw actor and join what comes back."""
    pairs = zip(actors, np.split(array, len(actors)), strict=True)
    parts: list[Array] = ray.get([actor.echo.remote(part) for actor, part in pairs])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def empty_calls(sizes: Sequence[int], num_rounds: int) -> None:
    """Print the cost of a call without arguments, by number of workers."""
    print("The empty call:\n\n| workers | raw Ray, us | hybridrl, us | ratio | us per worker |")
    print("|---:|---:|---:|---:|---:|")
    for size in sizes:
        actors = raw_actors(size)
        pool = RayResourcePool([size], num_cpus_per_rank=0.5)
        with RayWorkerGroup(pool, RayClassWithInitArgs(Echo)) as group:
            ways: dict[str, Callable[[], object]] = {
                "raw": partial(raw_empty_call, actors),
                "ours": group.nothing,
            }
            medians_s = alternate(ways, max(min(50, num_rounds), num_rounds // size))
        for actor in actors:
            ray.kill(actor)
        raw, ours = medians_s["raw"] * 1e6, medians_s["ours"] * 1e6
        print(f"| {size} | {raw:.0f} | {ours:.0f} | {ours / raw:.2f} | {ours / size:.0f} |")


def batches(num_bytes: int, num_rounds: int) -> None:
    """Print the cost of a batch there and back."""
    shape = (_ROWS, num_bytes // _ROWS // 4)
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    tensor = torch.from_numpy(array)
    batch = TensorDict({"observations": tensor}, [_ROWS])
    print(f"{num_bytes // 10**6} MB there and back:\n")
    print("| ranks | payload | raw Ray numpy, ms | hybridrl, ms | ratio |")
    print("|---:|---|---:|---:|---:|")
    for size in (1, 2):
        actors = raw_actors(size)
        with RayWorkerGroup(RayResourcePool([size]), RayClassWithInitArgs(Echo)) as group:
            ways = {
                "raw": partial(raw_echo, actors, array),
                "numpy": partial(group.echo, array),
                "torch tensor": partial(group.echo, tensor),
                "TensorDict": partial(group.echo, batch),
            }
            medians_s = alternate(ways, num_rounds)
        for actor in actors:
            ray.kill(actor)
        raw_s = medians_s.pop("raw")
        for name, ours_s in medians_s.items():
            print(
                f"| {size} | {name} | {raw_s * 1e3:.0f} | {ours_s * 1e3:.0f} "
                f"| {ours_s / raw_s:.2f} |"
            )


def main() -> None:
    """Run both measurements on a Ray of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--empty-rounds", type=int, default=2000)
    parser.add_argument("--batch-rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="numbers of workers")
    parser.add_argument("--batch-mb", type=int, default=256)
    options = parser.parse_args()
    env.set_value("PYTHONPATH", str(Path(__file__).parents[1]))
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
