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
    """KeySpans of layers on each pipeline rank: more make shorter bubbles and more messages."""

    num_layers_in_first_stage: Layers | None
    """Layers of the first pipeline rank, which has the embedding too; null is as many as of the
    ranks in between. For models whose layers do not divide, as the 94 of Qwen3-235B-A22B."""

    num_layers_in_last_stage: Layers | None
    """Likewise of the last one, which has the output embedding too."""

    context_parallel_size: Ranks
    """Ranks that share the tokens of each row, and gather keys and values in attention: for rows
    too long for one. A pack of max_tokens_per_microbatch is divided among them."""

    expert_parallel_size: Ranks
    """Ranks, of those with other rows or other tokens, that share the experts of a layer."""

    expert_tensor_parallel_size: Ranks
    """Ranks that share the matrices of one expert."""

    layers: Literal["auto", "local", "transformer_engine"]
    """Whose kernels compute a layer: TransformerEngine's, or megatron-core's own. ``auto`` is
    TransformerEngine where it is installed, on CUDA."""

    attention: Literal["auto", "packed", "transformer_engine"]
    """Whose kernel computes attention over a pack: that of FSDP2 (``packed``; which one, says
    ``model.attention``), or TransformerEngine's, which needs its layers. ``auto`` is
    TransformerEngine's with its layers, on CUDA in bfloat16, unless ``model.attention`` asks for
    another."""

    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"], ...]
    """What is recomputed in the backward pass where ``gradient_checkpointing`` is true; nothing
    named is whole layers. ``core_attn`` is attention without its projections, ``mlp`` that of dense
    layers, ``moe`` that of experts, router included, and ``moe_act`` the activation in experts that
    TransformerEngine groups."""

    overlap_communication: Literal["auto", True, False]
    """Sum gradients over data-parallel ranks while earlier layers compute theirs, in the last
    micro-batch of a step, and gather the weights that a step changed while the first layers of the
    next one compute; weights that are exported or scored with before that are gathered at once.
    ``auto`` is where this needs no waiting: on CUDA."""

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

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...] | None:
        """Return how many layers each pipeline rank has; None where they do not divide.

        Args:
            num_layers: of the whole model.
        """
        size, num_virtual = self.pipeline_parallel_size, self.num_virtual_stages
        first, last = self.num_layers_in_first_stage, self.num_layers_in_last_stage
        ends = [end for end in (first, last) if end is not None]
        num_between, left = size - len(ends), num_layers - sum(ends)
        is_odd = size == 1 and ends  # megatron-core splits no single rank
        # With virtual stages megatron-core divides by the number of ranks in between.
        lacks_between = num_between <= 0 and (left or num_between or num_virtual > 1)
        if is_odd or lacks_between or left < num_between:
            return None
        each = left // num_between if num_between else 0
        stages = [each] * num_between
        stages = [*([] if first is None else [first]), *stages, *([] if last is None else [last])]
        divides = sum(stages) == num_layers and all(n % num_virtual == 0 for n in stages)
        return tuple(stages) if divides else None

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
