"""From a run's configuration to how megatron-core sums gradients and takes steps."""

from __future__ import annotations

import torch

from hybridrl.config.actor import EngineConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.workers.train.mcore.given import build_configuration
from hybridrl.workers.train.mcore.megatron_core import (
    DistributedDataParallelConfig,
    OptimizerConfig,
)


def optimizer_config(engine: EngineConfig, megatron: MegatronConfig) -> OptimizerConfig:
    """Say to megatron-core how to take steps.

    Args:
        engine: rates and types.
        megatron: ``optimizer_args``.

    Raises:
        ConfigError: it does not take ``megatron.optimizer_args``, or refuses the whole.
    """
    is_half = engine.compute_dtype == "bfloat16"
    adamw = engine.optimizer
    ours: dict[str, object] = {
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
    }
    return build_configuration(
        OptimizerConfig, ours, megatron.optimizer_args, key="megatron.optimizer_args"
    )


def ddp_config(engine: EngineConfig, megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """Say to megatron-core how to sum gradients.

    Args:
        engine: types.
        megatron: ``ddp_args``, and whether to overlap.

    Raises:
        ConfigError: it does not take ``megatron.ddp_args``, or refuses the whole.
    """
    ours: dict[str, object] = {
        "grad_reduce_in_fp32": engine.reduce_dtype == "float32",
        "overlap_grad_reduce": megatron.overlap_communication,
        "use_distributed_optimizer": True,
    }
    return build_configuration(
        DistributedDataParallelConfig, ours, megatron.ddp_args, key="megatron.ddp_args"
    )
