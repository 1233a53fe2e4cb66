"""Rules about machines and the Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_SMALLEST_STORE_MIB = 80


def check_nodes_have_a_cluster(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ray, started on this machine alone, has one node."""
    cluster = config.cluster
    if cluster.num_nodes > 1 and cluster.address is None:
        yield ConfigError(
            "cluster.num_nodes",
            cluster.num_nodes,
            "cluster.ray_address=null starts Ray on this machine alone",
            remedies=[("cluster.ray_address=auto",), ("cluster.num_nodes=1",)],
        )


def check_ray_address(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The address is one that Ray understands."""
    address = config.cluster.ray_address
    if address is not None and not re.fullmatch(r"auto|(ray://)?[^/:\s]+:\d+", address):
        yield ConfigError(
            "cluster.ray_address",
            address,
            "must be auto, HOST:PORT or ray://HOST:PORT",
            remedies=[("cluster.ray_address=auto",)],
        )


def check_object_store(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The store's size is said to whoever starts Ray, and Ray has a smallest one."""
    key, size_mib = "cluster.object_store_mib", config.cluster.object_store_mib
    if size_mib and config.cluster.address is not None:
        yield ConfigError(
            key,
            size_mib,
            "would be ignored: Ray runs already; `ray start --object-store-memory=BYTES` sets it",
            remedies=[(f"{key}=0",)],
        )
    if 0 < size_mib < _SMALLEST_STORE_MIB:
        yield ConfigError(
            key,
            size_mib,
            f"Ray's object store takes at least {_SMALLEST_STORE_MIB} MiB",
            remedies=[(f"{key}={_SMALLEST_STORE_MIB}",), (f"{key}=0",)],
        )
