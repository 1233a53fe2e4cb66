"""The rule about keys that the chosen rollout engine does not read: no knob is dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

READ_BY: Mapping[str, tuple[str, str | int | float | bool]] = {
    "num_threads": ("hf", 1),
    "memory_fraction": ("sglang", 0.85),
    "cuda_graphs": ("sglang", True),
    "routed_experts": ("sglang", False),
    "start_timeout_s": ("sglang", 600.0),
    "request_timeout_s": ("sglang", 600.0),
}
"""Keys of ``rollout`` that one engine alone reads, and their value in hydra_configs/rollout."""


def check_rollout_keys_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Keys of the other rollout engine are as they were: else a setting would be ignored."""
    engine, values = config.rollout.engine, asdict(config.rollout)
    for name, (reader, usual) in READ_BY.items():
        if reader == engine or values[name] == usual:
            continue
        reset = f"rollout.{name}={str(usual).lower()}"
        yield ConfigError(
            f"rollout.{name}",
            values[name],
            f"would be ignored: rollout.engine={reader} alone reads it, and this is {engine}",
            remedies=[(reset,)],
            fix=f"set {reset}, or rollout={reader}",
        )
