"""Weights to rollout servers: as files and by broadcast, against a memcpy and the disk.

Two embedded engines, each in a process of its own, on this machine; models with random weights in
float32. A row has the medians of some updates: how long rank 0 takes to publish the weights, how
long both engines take to pause, load and continue, and the bytes of one copy per second of both.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_routes [--hidden-sizes 256 512 1024] [--rounds 5]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.serving import served, timed
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.serving import WeightRoute
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.starter import write_random_model
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.sharding.control import ControlGroup, Neighbours
from hybridrl.workers.sharding.published_weights import PublishedWeights, publish_weights
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for, stream_weights

_ROUTES: tuple[WeightRoute, ...] = ("files", "broadcast")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5, help="updates after one to warm up")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    print("| MiB | way | publish, s | load, s | MB/s | times memcpy | times the disk |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for hidden_size in options.hidden_sizes:
        config = config_of(hidden_size, options.overrides)
        if config.model.starter is None:
            parser.error("give no model.path: the model has random weights")
        with tempfile.TemporaryDirectory(prefix="routes-") as root:
            folder = Path(root) / "model"
            write_random_model(config.model.starter, folder, seed=0)
            with ray_cluster(config.cluster, num_more_ranks=config.num_server_devices):
                measure(config, folder, num_rounds=options.rounds)


def config_of(hidden_size: int, overrides: Sequence[str]) -> ExperimentConfig:
    """Return the configuration of two engines and a model of this size."""
    starter = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_layers": 6,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
    }
    shape = [f"model.starter.{key}={value}" for key, value in starter.items()]
    return load_config(compose(["serving=own", "tracking.trackers=[]", *shape, *overrides]))


def measure(config: ExperimentConfig, folder: Path, *, num_rounds: int) -> None:
    """Print the rows of one model."""
    weights = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    memcpy_s = median_of([timed(partial(copy_of, weights)) for _ in range(1 + num_rounds)])
    disk_s = median_of([timed(partial(write_through, weights)) for _ in range(1 + num_rounds)])
    with served(config, folder) as (server, _):
        for route in _ROUTES:
            published = publish_weights(route, host="127.0.0.1", config=config.rollout)
            try:
                rounds = [update(config, server, published, weights) for _ in range(1 + num_rounds)]
            finally:
                published.close()
            publish_s, load_s = (median_of(seconds) for seconds in zip(*rounds, strict=True))
            both_s = publish_s + load_s
            print(
                f"| {num_bytes / 2**20:.0f} | {route} | {publish_s:.3f} | {load_s:.3f} | "
                f"{num_bytes / both_s / 1e6:.0f} | {both_s / memcpy_s:.1f} | "
                f"{both_s / disk_s:.2f} |",
                flush=True,
            )


def update(
    config: ExperimentConfig,
    server: RolloutServer,
    published: PublishedWeights,
    weights: Mapping[str, Tensor],
) -> tuple[float, float]:
    """Bring all engines to new weights, as rank 0 does; return the seconds of both halves."""
    control = ControlGroup(timeout_s=60.0)

    def publish() -> None:
        published.begin()
        report = stream_weights(
            iter(weights.items()),
            published.write,
            sender=None,
            bucket_bytes=bucket_bytes_for(config.rollout.bucket_mib, torch.device("cpu")),
            control=control,
            neighbours=Neighbours(control, size=1),
        )
        if report.failures:
            raise RuntimeError(report.failures[0])

    def load() -> None:
        server.update(published.source(), version=server.version + 1)

    seconds = timed(publish), timed(load)
    published.end_update()
    return seconds


def copy_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Copy all weights within this process: no way of theirs is shorter."""
    return [tensor.clone() for tensor in weights.values()]


def write_through(weights: Mapping[str, Tensor]) -> None:
    """Write all weights to the disk of ``$TMPDIR``, and wait until they are there."""
    with tempfile.NamedTemporaryFile() as file:
        save_file(dict(weights), file.name)
        with Path(file.name).open("rb") as written:
            os.fsync(written.fileno())


def median_of(seconds: Sequence[float]) -> float:
    """Return the median of all rounds but the first."""
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
