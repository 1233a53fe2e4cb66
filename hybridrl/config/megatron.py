"""The ``megatron`` section: how models that train on megatron-core are cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridrl.config.limits import ArgumentValue, Layers, NotNegative, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """Parallel sizes and kernels of every engine named ``megatron``: policy, reference, critic.

    Mirrors hydra_configs/megatron/*.yaml. Ranks that are not needed for tensor, pipeline and
    context parallelism are data-parallel, and share the optimizer's state.
    """

    tensor_parallel_size: Ranks
    """Ranks that share each matrix; they exchange activations twice a layer, so keep them on one
    node."""

    sequence_parallel: bool
    """Let tensor-parallel ranks share norms and residuals as well, each a part of the tokens."""

    pipeline_parallel_size: Ranks
    """Ranks that have a stretch of layers each."""

    num_virtual_stages: Layers
    """Stretches of layers on each pipeline rank: more make shorter bubbles and more messages."""

    context_parallel_size: Ranks
    """Ranks that share the tokens of each row, and gather keys and values in attention: for rows
    too long for one. A pack of max_tokens_per_microbatch is divided among them."""

    expert_parallel_size: Ranks
    """Ranks, of those with other rows or other tokens, that share the experts of a layer."""

    expert_tensor_parallel_size: Ranks
    """Ranks that share the matrices of one expert."""

    layers: Literal["auto", "local", "transformer_engine"]
    """Whose kernels compute a layer: TransformerEngine's, or megatron-core's own. The attention is
    that of FSDP2 in either. ``auto`` is TransformerEngine where it is installed, on CUDA, and no
    adapter stands beside linear layers."""

    overlap_communication: bool
    """Sum gradients over data-parallel ranks while earlier layers compute theirs, in the last
    micro-batch of a step. CUDA only. Weights are not gathered in the background after a step: they
    are exported, or computed with, right then."""

    load_balance_coefficient: NotNegative
    """Weight of the load-balance loss of mixture-of-experts layers (arXiv:2006.16668), added up
    over layers; 0 only measures it. See docs/mixture-of-experts.md."""

    replay_routing: bool
    """Send each token of the policy through the experts that the rollout engine sent it through.
    Needs ``rollout.routed_experts=true``. The reference and the critic choose their own."""

    transformer_args: Mapping[str, ArgumentValue]
    """Further fields of megatron-core's TransformerConfig by their names, as fp8; handed on as they
    are. What has a key of its own here is refused."""

    optimizer_args: Mapping[str, ArgumentValue]
    """Further fields of its OptimizerConfig, as optimizer_cpu_offload; likewise."""

    ddp_args: Mapping[str, ArgumentValue]
    """Further fields of its DistributedDataParallelConfig, as bucket_size; likewise."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model's dense layers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def expert_parallel_ranks(self) -> int:
        """Ranks that together hold one copy of the model's experts."""
        return (
            self.expert_parallel_size
            * self.expert_tensor_parallel_size
            * self.pipeline_parallel_size
        )

    @property
    def world_multiple(self) -> int:
        """What the number of ranks must be a multiple of."""
        return math.lcm(self.model_parallel_size, self.expert_parallel_ranks)
