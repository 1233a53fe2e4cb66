"""Rules about arguments passed to megatron-core by its own names: those that no run can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridrl.config.checks.messages import error, own_arguments, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ConfigError

_DISPATCHERS = ("alltoall", "flex")
"""Those that need a different number of tokens from each rank."""

_MOMENT_TYPES = ("float32", "bfloat16")

_FEW_BITS = ("fp8", "fp4")
PRECISION_AWARE = "use_precision_aware_optimizer"
_SMALL_STATE = (PRECISION_AWARE, "exp_avg_dtype", "exp_avg_sq_dtype")


def keys_of_transformer_engine(megatron: MegatronConfig) -> dict[str, ArgumentValue]:
    """Return the requests, by key, that only TransformerEngine can serve."""
    keys: dict[str, ArgumentValue] = {}
    if megatron.layers == "transformer_engine":
        keys["megatron.layers"] = megatron.layers
    if megatron.attention == "transformer_engine":
        keys["megatron.attention"] = megatron.attention
    for name in _FEW_BITS:
        if megatron.transformer_args.get(name):
            keys[f"megatron.transformer_args.{name}"] = megatron.transformer_args[name]
    if megatron.optimizer_args.get(PRECISION_AWARE):
        keys[f"megatron.optimizer_args.{PRECISION_AWARE}"] = True
    return keys


def without_transformer_engine(megatron: MegatronConfig) -> MegatronConfig:
    """Return the section without the keys of ``keys_of_transformer_engine``."""
    return replace(
        megatron,
        layers="local",
        attention="packed",
        transformer_args={
            name: value
            for name, value in megatron.transformer_args.items()
            if not name.startswith(_FEW_BITS)
        },
        optimizer_args={
            name: value
            for name, value in megatron.optimizer_args.items()
            if name not in _SMALL_STATE
        },
    )


def check_passed_arguments(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Arguments with a key are set by that key alone; others change neither model nor objective.

    ``mode=check`` reports what megatron-core refuses; it asks megatron-core itself.
    """
    if not config.megatron_worlds:
        return
    for name in ("transformer_args", "optimizer_args", "ddp_args"):
        yield from refuse_own_arguments(config, f"megatron.{name}")
    of_model = own_arguments("megatron.transformer_args").of_model
    for name, value in config.megatron.transformer_args.items():
        key = f"megatron.transformer_args.{name}"
        if name in of_model:
            fix = f"set model.path to a model of that shape, and ~{key}"
            yield error(config, key, "the model's config.json sets it", f"~{key}", fix=fix)
        elif name == "moe_token_dispatcher_type" and value not in _DISPATCHERS:
            rule = (
                "ranks have different numbers of tokens; of megatron-core's dispatchers only "
                f"{' and '.join(_DISPATCHERS)} support that"
            )
            yield error(config, key, rule, f"~{key}")


def check_optimizer_state(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The state of the optimizer has a form that a checkpoint can save."""
    if not config.megatron_worlds:
        return
    given = config.megatron.optimizer_args
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(name) not in (None, *_MOMENT_TYPES):
            key = f"megatron.optimizer_args.{name}"
            rule = (
                f"must be {' or '.join(_MOMENT_TYPES)}: of others megatron-core keeps scaled "
                "values, from which no other engine resumes"
            )
            yield error(config, key, rule, f"~{key}")


RULES = (check_passed_arguments, check_optimizer_state)
