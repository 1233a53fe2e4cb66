"""Megatron-core's process groups, and this rank's number in each of them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ResourceError
from hybridrl.models.packed_share import ContextParallelRank
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.megatron.context import MegatronContext, ParallelRank
from hybridrl.workers.train.megatron.megatron_core import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
    parallel_state,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """This rank in each of the groups that share a model."""

    config: MegatronConfig
    device: torch.device
    tensor: Ranks  # they share each matrix
    pipeline: Ranks  # they have other layers
    context: Ranks  # they have other tokens of the same rows
    data: Ranks  # they have other rows
    replica: ProcessGroup  # together they have the full model: dense layers and experts
    rank: ParallelRank

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last layer and the head."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's share of the loss counts; others repeat it, or have none."""
        return self.is_last_stage and self.tensor.rank == 0

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank returns the results of the ranks that have the same rows."""
        return self.counts and self.context.rank == 0

    @property
    def token_share(self) -> ContextParallelRank | None:
        """This rank's part of each micro-batch; None if it has all of it."""
        if self.context.size == 1:
            return None
        gather = partial(gather_from_sequence_parallel_region, group=self.context.group)
        return ContextParallelRank(self.context.rank, self.context.size, gather)


def start_parallel(context: MegatronContext) -> Parallel:
    """Make the process groups, once for all engines of a process; a collective call."""
    config, device, timeout_s = context.megatron, context.device, context.timeout_s
    if not parallel_state.model_parallel_is_initialized():
        num_virtual_stages = config.num_virtual_stages
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel_size,
            pipeline_model_parallel_size=config.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=(
                num_virtual_stages if num_virtual_stages > 1 else None
            ),
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
        _seed(context.seed, device)
    replica_size = math.lcm(
        config.tensor_parallel_size * config.context_parallel_size,
        config.expert_tensor_parallel_size * config.expert_parallel_size,
    )
    return Parallel(
        config=config,
        device=device,
        tensor=Ranks(device, group=parallel_state.get_tensor_model_parallel_group()),
        pipeline=Ranks(device, group=parallel_state.get_pipeline_model_parallel_group()),
        context=Ranks(device, group=parallel_state.get_context_parallel_group()),
        data=Ranks(device, group=parallel_state.get_data_parallel_group()),
        replica=_replica_group(config.pipeline_parallel_size, replica_size, timeout_s),
        rank=ParallelRank(
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=config.tensor_parallel_size,
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
            ep_size=config.expert_parallel_size,
            etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            etp_size=config.expert_tensor_parallel_size,
        ),
    )


def _seed(seed: int, device: torch.device) -> None:
    """Seed megatron-core's generators: its first use of CUDA."""
    try:
        model_parallel_cuda_manual_seed(seed)
    except (AssertionError, RuntimeError) as err:
        if device.type == "cuda":
            raise
        raise ResourceError(
            "megatron-core asks for CUDA, and cluster.device=cpu: from a checkout set "
            "cluster.worker_setup_hook=tests.megatron.stand_ins.install, which stands in for it "
            "(recipes=cpu/megatron does), or set cluster=one_gpu, or actor=fsdp2"
        ) from err


@functools.cache
def _replica_group(num_stages: int, size: int, timeout_s: float) -> ProcessGroup:
    """Make the groups of ranks that together have a full model, and return this rank's.

    Megatron-core numbers ranks by tensor, context, expert, data and last by pipeline rank. Dense
    layers repeat after tensor x context ranks of a stage, experts after theirs, both after
    ``size`` ranks.
    """
    stages = torch.arange(dist.get_world_size()).view(num_stages, -1)
    replicas = [ranks.flatten().tolist() for ranks in torch.split(stages, size, dim=1)]
    timeout = timedelta(seconds=timeout_s)
    group: ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(replicas, timeout)  # type: ignore[no-untyped-call]
    return group
