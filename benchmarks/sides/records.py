"""A run in this process whose record also does something else after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import yaml

from hybridrl import env
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.record import RunFolder, open_record
from hybridrl.run.train import train

R = TypeVar("R", bound=RunFolder)


def train_with(record_class: type[R], words: Sequence[str], **more: object) -> R:
    """Train as ``python -m hybridrl.main`` does, Ray and all; returns the record."""
    composed = compose(list(words))
    config = load_config(composed)
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    kept: dict[str, Any]
    with (
        open_record(config, resolved_yaml=yaml.safe_dump(composed)) as opened,
        ray_cluster(config.cluster),
    ):
        kept = {one.name: getattr(opened, one.name) for one in fields(opened)} | more
        record = record_class(**kept)
        train(config, record=record)
    return record
