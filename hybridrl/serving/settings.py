"""Settings of engines on devices of their own: those of the run, changed by group and place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.serving import HALVES, PlacedGroup
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.serving.plan import plan_servers

_TRANSFER_ON_CPU = {"disaggregation_transfer_backend": "mooncake_tcp"}
"""The only way of keys and values from engine to engine that needs no device."""

_MOST_RESERVED = 512
"""Tokens that SGLang keeps free for each response before it admits one more: a cache with less room
admits none, not even its own first request."""

_READ_BY_ENGINES = ("SGLANG_", "NCCL_", "GLOO_", "UCX_", "MC_")
"""Beginnings of the variables of SGLang, its collectives, and its transfers of keys and values."""

_REHEARSED_PORT = 20_000


def engine_config(
    config: ExperimentConfig,
    engine_args: Mapping[str, ArgumentValue],
    *,
    num_devices: int = 1,
    number: int = 0,
) -> ExperimentConfig:
    """Return the configuration of an engine on devices of its own, which never sleeps.

    Args:
        engine_args: of its group and place; they replace those of the run.
        num_devices: that share the engine.
        number: of the engine. Engines of one seed would draw the same random numbers.
    """
    defaults: dict[str, ArgumentValue] = {}
    if "disaggregation_mode" in engine_args and config.cluster.device == "cpu":
        defaults |= _TRANSFER_ON_CPU
    if engine_args.get("disaggregation_mode") == "decode":
        most = min(config.rollout.max_response_tokens, _MOST_RESERVED)
        defaults["num_reserved_decode_tokens"] = most
    rollout = replace(
        config.rollout,
        engine_args={**defaults, **config.rollout.engine_args, **engine_args},
        tensor_parallel_size=num_devices,
        # A handle of shared memory is for one process of a server; a file is for all.
        transport="auto" if num_devices == 1 else "disk",
        sleep=False,
    )
    return replace(config, rollout=rollout, seed=config.seed + number)


def attached_config(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration of an engine of the policy whose server others run.

    Its process has no device, and no memory in common with the server.
    """
    rollout = replace(config.rollout, engine_args={}, tensor_parallel_size=1, sleep=False)
    return replace(config, cluster=replace(config.cluster, device="cpu"), rollout=rollout)


def frozen_config(config: ExperimentConfig, model: str) -> ExperimentConfig:
    """Return the configuration of the engines of a frozen model.

    Args:
        model: name. Its context takes the room of a row of the policy.
    """
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=max_context_tokens(config, model) - 1),
        rollout=replace(config.rollout, max_response_tokens=1, routed_experts=False),
    )


def driver_variables(config: ExperimentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that engines get, in the place of those of their nodes.

    On the driver's machine alone they inherit all of its environment.
    """
    if config.cluster.address is None:
        return {}
    return {name: text for name, text in environment.items() if name.startswith(_READ_BY_ENGINES)}


def rehearsed_configs(
    config: ExperimentConfig,
) -> Iterator[tuple[PlacedGroup, ExperimentConfig]]:
    """Yield each group with engines, and the configuration of one with ports that nobody opens."""
    plans = {
        (plan.model, group.name): group for plan in plan_servers(config) for group in plan.groups
    }
    for placed in config.serving.placed_groups:
        group = plans[placed.model, placed.name]
        if not group.engines:
            continue
        if group.needs_offload:  # as its rank starts it
            yield placed, config
            continue
        args: dict[str, ArgumentValue] = dict(placed.config.engine_args)
        if group.worker_type in HALVES:
            args["disaggregation_mode"] = group.worker_type
        if group.worker_type == "prefill":
            args["disaggregation_bootstrap_port"] = _REHEARSED_PORT
        if group.num_nodes_per_engine > 1:
            args |= {
                "nnodes": group.num_nodes_per_engine,
                "node_rank": 0,
                "dist_init_addr": f"127.0.0.1:{_REHEARSED_PORT}",
                "nccl_port": _REHEARSED_PORT,
            }
        yield placed, engine_config(config, args, num_devices=placed.config.devices_per_engine)
