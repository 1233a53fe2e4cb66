"""From a run's configuration to how megatron-core sums gradients and takes steps."""

from __future__ import annotations

import torch

from hybridrl.config.actor import EngineConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.workers.train.megatron.given import build_configuration
from hybridrl.workers.train.megatron.megatron_core import (
    DistributedDataParallelConfig,
    OptimizerConfig,
)
from hybridrl.workers.train.megatron.transformer import Duty


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
        "store_param_remainders": False,  # optimizer_state.py hands whole masters on
    }
    return build_configuration(
        OptimizerConfig, own_values, megatron.optimizer_args, key="megatron.optimizer_args"
    )


def overlaps(megatron: MegatronConfig, device: torch.device) -> bool:
    """Say whether ranks talk while they compute."""
    asked = megatron.overlap_communication
    return device.type == "cuda" if asked == "auto" else asked


def ddp_config(
    engine: EngineConfig, megatron: MegatronConfig, device: torch.device, *, duty: Duty
) -> DistributedDataParallelConfig:
    """Say to megatron-core how to sum gradients.

    Args:
        engine: types.
        megatron: ``ddp_args``, and whether to overlap.
        device: where the model computes.
        duty: what learns. Adapters are gathered at once: no module of theirs is called, which
            could wait for them.

    Raises:
        ConfigError: it does not take ``megatron.ddp_args``, or refuses the whole.
    """
    is_overlapped = overlaps(megatron, device)
    own_values: dict[str, object] = {
        "grad_reduce_in_fp32": engine.reduce_dtype == "float32",
        "overlap_grad_reduce": is_overlapped,
        "overlap_param_gather": is_overlapped and duty == "learns",
        "use_distributed_optimizer": True,
    }
    return build_configuration(
        DistributedDataParallelConfig, own_values, megatron.ddp_args, key="megatron.ddp_args"
    )
