"""Configuration objects of megatron-core, from our keys and from its own fields set by a user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import torch

from hybridrl.config.actor import EngineConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ConfigError, close_names
from hybridrl.workers.train.megatron.context import Duty
from hybridrl.workers.train.megatron.megatron_core import (
    DistributedDataParallelConfig,
    OptimizerConfig,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Values of fields that are types of numbers."""

Configuration = TypeVar("Configuration")


def build_configuration(
    kind: type[Configuration],
    own_values: Mapping[str, object],
    user_values: Mapping[str, ArgumentValue],
    *,
    key: str,
) -> Configuration:
    """Build one of megatron-core's configuration classes.

    Args:
        own_values: those that follow from our own keys.
        user_values: those that the user adds, by field name; ``bfloat16`` names a type of numbers.

    Raises:
        ConfigError: a field does not exist, or megatron-core rejects the configuration.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in user_values.items():
        if name not in types:
            entry = f"{key}.{name}"
            rule = f"megatron-core's {kind.__name__} has no such field"
            close = " or ".join(map(repr, close_names(name, list(types))))
            fix = f"{f'did you mean {close}? Else ' if close else ''}leave it out, or add ~{entry}"
            raise ConfigError(entry, value, rule, fix, remedies=[(f"~{entry}",)])
    values = {name: _as_field(f"{key}.{name}", types[name], v) for name, v in user_values.items()}
    try:
        return kind(**{**own_values, **values})
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as err:
        raise ConfigError(
            key if user_values else "megatron",
            dict(user_values) or "as configured",
            f"megatron-core's {kind.__name__} rejects it: {' '.join(str(err).split())}",
            f"change the value it names; fields: {kind.__module__}.{kind.__name__}",
        ) from err


def _as_field(key: str, kind: object, value: ArgumentValue) -> object:
    """Convert text and lists to the type of their field."""
    if "dtype" in str(kind) and isinstance(value, str):
        if value not in _DTYPES:
            fix = f"set {key} to one of them"
            raise ConfigError(key, value, f"must be one of {', '.join(_DTYPES)}", fix)
        return _DTYPES[value]
    return list(value) if isinstance(value, tuple) else value


def optimizer_config(engine: EngineConfig, megatron: MegatronConfig) -> OptimizerConfig:
    """Describe optimizer steps to megatron-core.

    Raises:
        ConfigError: it does not take ``megatron.optimizer_args``, or rejects the configuration.
    """
    is_half = engine.compute_dtype == "bfloat16"
    adamw = engine.optimizer
    own_values: dict[str, object] = {
        "optimizer": "adam",
        "lr": adamw.lr,
        "weight_decay": adamw.weight_decay,
        "adam_beta1": adamw.beta1,
        "adam_beta2": adamw.beta2,
        "adam_eps": adamw.eps,
        "clip_grad": 0.0,  # optimizer.py clips, after its guard
        "bf16": is_half,
        "params_dtype": torch.bfloat16 if is_half else torch.float32,
        "use_distributed_optimizer": True,
        "optimizer_offload_fraction": 1.0,  # where optimizer_cpu_offload asks for any; its own is 0
        "store_param_remainders": False,  # OptimizerState needs full masters
    }
    return build_configuration(
        OptimizerConfig, own_values, megatron.optimizer_args, key="megatron.optimizer_args"
    )


def ddp_config(
    engine: EngineConfig, megatron: MegatronConfig, device: torch.device, *, duty: Duty
) -> DistributedDataParallelConfig:
    """Describe the sum of gradients to megatron-core.

    Adapters are gathered at once: no module of theirs is called that could wait for them.

    Raises:
        ConfigError: it does not take ``megatron.ddp_args``, or rejects the configuration.
    """
    asked = megatron.overlap_communication
    is_overlapped = device.type == "cuda" if asked == "auto" else asked
    own_values: dict[str, object] = {
        "grad_reduce_in_fp32": engine.reduce_dtype == "float32",
        "overlap_grad_reduce": is_overlapped,
        "overlap_param_gather": is_overlapped and duty == "learns",
        "use_distributed_optimizer": True,
    }
    return build_configuration(
        DistributedDataParallelConfig, own_values, megatron.ddp_args, key="megatron.ddp_args"
    )
