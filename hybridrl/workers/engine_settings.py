"""Settings of the engines of a group: those of the run, changed by group and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.serving import HALVES, ServerGroupConfig
from hybridrl.config.topology import LedDevices
from hybridrl.rewards.judge_reader import max_context_tokens

_TRANSFER_ON_CPU = {"disaggregation_transfer_backend": "mooncake_tcp"}
"""The only way of keys and values from engine to engine that needs no device."""

_MOST_RESERVED = 512
"""Tokens that SGLang keeps free for each response before it admits one more: a cache with less room
admits none, not even its own first request."""

_EMBEDDINGS = "zmq_to_tokenizer"
"""With the other ways a server does not say how many tokens it made of an image, and a scheduler
that waits for embeddings polls once a second on a CPU (0.5.23)."""

_READ_BY_ENGINES = ("SGLANG_", "NCCL_", "GLOO_", "UCX_", "MC_")
"""Beginnings of the variables of SGLang, its collectives, and its transfers of keys and values."""


def engine_config(
    config: ExperimentConfig,
    engine_args: Mapping[str, ArgumentValue],
    *,
    num_devices: int = 1,
    number: int = 0,
    sleeps: bool = False,
) -> ExperimentConfig:
    """Return the configuration of an engine of a group; ``engine_args`` replace the run's.

    Engines of one seed would draw the same random numbers: ``number`` is added to it. One that
    ``sleeps`` has devices of the trainer.
    """
    defaults: dict[str, ArgumentValue] = {}
    if "disaggregation_mode" in engine_args and config.cluster.device == "cpu":
        defaults |= _TRANSFER_ON_CPU
    if engine_args.get("disaggregation_mode") == "decode":
        most = min(max(config.response_limits.values()), _MOST_RESERVED)
        defaults["num_reserved_decode_tokens"] = most
    rollout = replace(
        config.rollout,
        engine_args={**defaults, **config.rollout.engine_args, **engine_args},
        tensor_parallel_size=num_devices,
    )
    if not sleeps:
        rollout = replace(rollout, transport=_transport(num_devices), sleep=False)
    return replace(config, rollout=rollout, seed=config.seed + number)


def _transport(num_devices: int) -> Literal["auto", "disk"]:
    """A handle of shared memory is for one process of a server; a file is for all."""
    return "auto" if num_devices == 1 else "disk"


def led_config(
    config: ExperimentConfig, engine: LedDevices, *, bootstrap_port: int | None = None
) -> ExperimentConfig:
    """Return the configuration of an engine that a rank owns; prefill ones have a port."""
    if engine.group is None:
        return replace(config, seed=config.seed + engine.leader)
    if engine.folder is not None:  # no sync sends its weights again
        transport = _transport(len(engine.ranks))
        rollout = replace(config.rollout, backup_weights="always", transport=transport)
        config = frozen_config(replace(config, rollout=rollout), engine.model)
    return engine_config(
        config,
        group_arguments(engine.group.config, bootstrap_port=bootstrap_port),
        num_devices=len(engine.ranks),
        number=engine.leader,
        sleeps=True,
    )


def group_arguments(
    group: ServerGroupConfig, *, bootstrap_port: int | None = None, encoders: Sequence[str] = ()
) -> dict[str, ArgumentValue]:
    """Return SGLang's arguments of a group: of its part of the work, and its own.

    ``encoders`` are the URLs of those of its model.
    """
    args: dict[str, ArgumentValue] = {}
    if group.worker_type in HALVES:
        args["disaggregation_mode"] = group.worker_type
    if encoders or group.worker_type == "encoder":
        args["encoder_transfer_backend"] = _EMBEDDINGS
    if group.worker_type == "encoder":
        args |= {"encoder_only": True, "enable_prefix_mm_cache": True}
    elif encoders:
        args |= {"language_only": True, "encoder_urls": tuple(encoders)}
    args |= group.engine_args
    if bootstrap_port is not None:
        args["disaggregation_bootstrap_port"] = bootstrap_port
    return args


def attached_config(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration of an engine whose server others run: it has no device."""
    rollout = replace(config.rollout, engine_args={}, tensor_parallel_size=1, sleep=False)
    return replace(config, cluster=replace(config.cluster, device="cpu"), rollout=rollout)


def frozen_config(config: ExperimentConfig, model: str) -> ExperimentConfig:
    """Return the configuration of a frozen model's engines: rows are as long as its context."""
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=max_context_tokens(config, model) - 1),
        rollout=replace(config.rollout, max_response_tokens=1),
        eval=replace(config.eval, max_response_tokens=None, sets={}),
        actor=replace(config.actor, replay_routing=False),
        lora=replace(config.lora, enabled=False),
    )


def driver_variables(config: ExperimentConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables for engines of a cluster; on one machine they inherit all."""
    if config.cluster.address is None:
        return {}
    return {name: text for name, text in environment.items() if name.startswith(_READ_BY_ENGINES)}
