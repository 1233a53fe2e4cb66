"""Weights to two SGLang servers: as files and by broadcast, against a memcpy.

A row has the median of some syncs, each a rollout phase in which nothing is sampled: rank 0
gathers the weights, both servers pause, load them and continue. Models are random, in float32.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_routes [--hidden-sizes 256 1024] [--rounds 5]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.serving import timed
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.serving import WeightRoute
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.starter import write_random_model
from hybridrl.serving.launching import start_servers
from hybridrl.workers.build import build_engines
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.train.protocol import TrainState, WeightSet, WeightSpec

_ROUTES: tuple[WeightRoute, ...] = ("files", "broadcast")
_CALL_S = 500.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5, help="updates after one to warm up")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    print("| MiB | way | s | MB/s | times memcpy |")
    print("|---:|---|---:|---:|---:|")
    for hidden_size in options.hidden_sizes:
        for route in _ROUTES:
            config = config_of(hidden_size, [f"serving.weights={route}", *options.overrides])
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
    common = ["serving=own", "rollout=sglang", "rollout.verify_weights=never"]
    few = ["rollout.bucket_mib=64", "tracking.trackers=[]", f"cluster.call_timeout_s={_CALL_S}"]
    return load_config(compose([*common, *few, *shape, *overrides]))


class Trainer:
    """Has weights, and no other memory."""

    dp_rank = 0
    dp_size = 1
    weight_sets = (WeightSet.BASE,)

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def weight_specs(self, weight_set: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Describe them."""
        return tuple(WeightSpec(n, tuple(t.shape), t.nbytes) for n, t in self._weights.items())

    def full_weights(
        self, weight_set: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield them."""
        return iter(self._weights.items())

    def resident_bytes(self, part: TrainState) -> int:
        """Return nothing that could leave."""
        return 0


def measure(config: ExperimentConfig, folder: Path, *, num_rounds: int) -> None:
    """Print the row of one model and one way."""
    weights = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    memcpy_s = median_of([timed(partial(copy_of, weights)) for _ in range(1 + num_rounds)])
    with start_servers(config, folder, variables={}) as servers:
        device = torch.device("cpu")
        control = ControlGroup(timeout_s=config.rollout.stage_timeout_s)
        engines = build_engines(config, folder, device, servers=servers, control=control)
        rank = ShardingManager(
            engines=engines,
            config=config.rollout,
            meter=PeakMeter(device),
            control=control,
            call_timeout_s=_CALL_S,
        )
        rank.attach_policy(Trainer(weights))  # type: ignore[arg-type]  # what a sync asks for
        seconds = [timed(partial(update, rank, version)) for version in range(1 + num_rounds)]
        rank.shutdown()
    both_s = median_of(seconds)
    print(
        f"| {num_bytes / 2**20:.0f} | {config.serving.weights} | {both_s:.2f} | "
        f"{num_bytes / both_s / 1e6:.0f} | {both_s / memcpy_s:.1f} |",
        flush=True,
    )


def update(rank: ShardingManager, version: int) -> None:
    """Bring both servers to new weights, as a step does."""
    rank.weights_changed(version=version)
    with rank.rollout_phase():
        pass


def copy_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Copy all weights within this process: no way of theirs is shorter."""
    return [tensor.clone() for tensor in weights.values()]


def median_of(seconds: Sequence[float]) -> float:
    """Return the median of all rounds but the first."""
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
