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


@dataclass(frozen=True, slots=True)
class GroupRank:
    """This rank's number in a process group."""

    rank: int
    size: int
    group: ProcessGroup

    @classmethod
    def in_group(cls, group: ProcessGroup) -> GroupRank:
        """Find this rank in a group that it belongs to."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """This rank in each of the groups that share a model."""

    config: MegatronConfig
    device: torch.device

    tensor: GroupRank
    """Shares each matrix."""

    pipeline: GroupRank
    """Has other layers."""

    context: GroupRank
    """Has other tokens of the same rows."""

    data: GroupRank
    """Has other rows."""

    expert: GroupRank
    """Has other experts."""

    expert_tensor: GroupRank
    """Shares the matrices of its experts."""

    replica: GroupRank
    """Has, together with this rank, the full model: dense layers and experts."""

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

    @property
    def rank(self) -> ParallelRank:
        """This rank among those that share a layer."""
        return ParallelRank(
            tp_rank=self.tensor.rank,
            tp_size=self.tensor.size,
            ep_rank=self.expert.rank,
            ep_size=self.expert.size,
            etp_rank=self.expert_tensor.rank,
            etp_size=self.expert_tensor.size,
        )

    def ranks_with_other_rows(self) -> Ranks:
        """Return the data-parallel ranks."""
        return Ranks(self.device, group=self.data.group)

    def ranks_with_other_tokens(self) -> Ranks:
        """Return the context-parallel ranks."""
        return Ranks(self.device, group=self.context.group)


def start_parallel(context: MegatronContext) -> Parallel:
    """Make the process groups, once in a process; a collective call.

    Engines of one process (policy, reference, critic) share them.

    Raises:
        ResourceError: the number of ranks is not divisible, or megatron-core asks for CUDA on a CPU
            and nothing stands in for it.
    """
    config, device, timeout_s = context.megatron, context.device, context.timeout_s
    world_size = dist.get_world_size()
    if world_size % config.model_parallel_size:
        raise ResourceError(
            f"megatron's parallel sizes make groups of {config.model_parallel_size} ranks, and "
            f"there are {world_size}; set cluster.num_nodes x cluster.num_ranks_per_node to a "
            "multiple of it"
        )
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
        tensor=GroupRank.in_group(parallel_state.get_tensor_model_parallel_group()),
        pipeline=GroupRank.in_group(parallel_state.get_pipeline_model_parallel_group()),
        context=GroupRank.in_group(parallel_state.get_context_parallel_group()),
        data=GroupRank.in_group(parallel_state.get_data_parallel_group()),
        expert=GroupRank.in_group(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=GroupRank.in_group(parallel_state.get_expert_tensor_parallel_group()),
        replica=GroupRank.in_group(
            _replica_group(config.pipeline_parallel_size, replica_size, timeout_s)
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
            "(recipes=megatron_cpu does), or set cluster=one_gpu, or actor=fsdp2"
        ) from err


@functools.cache
def _replica_group(num_stages: int, size: int, timeout_s: float) -> ProcessGroup:
    """Make the groups of ranks that together have a full model; a collective call.

    Megatron-core numbers ranks by tensor, context, expert, data and last by pipeline rank. Dense
    layers repeat after tensor x context ranks of a stage, experts after theirs.

    Args:
        num_stages: pipeline ranks.
        size: ranks of a stage after which both have repeated.

    Returns:
        The one that this rank belongs to.
    """
    world_size = dist.get_world_size()
    stage_size = world_size // num_stages
    own_group: ProcessGroup | None = None
    for begin in range(0, stage_size, size):
        ranks = [
            stage + begin + offset
            for stage in range(0, world_size, stage_size)
            for offset in range(size)
        ]
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            own_group = group
    if own_group is None:
        raise ResourceError(
            f"rank {dist.get_rank()} belongs to no replica of the model; report this as a bug"
        )
    return own_group
