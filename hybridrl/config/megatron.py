"""The ``megatron`` section: how megatron-core splits the models that it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybridrl.config.limits import Arguments, Layers, NotNegative, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """Parallel sizes and kernels of every engine named ``megatron``: policy, reference, critic.

    Mirrors hydra_configs/megatron/*.yaml. Ranks beyond tensor, pipeline and context parallelism
    are data-parallel, and divide the optimizer's state.
    """

    tensor_parallel_size: Ranks = 1
    """Ranks that split each matrix; they exchange activations twice a layer, so keep them on one
    node."""

    sequence_parallel: bool = False
    """Let tensor-parallel ranks also split norms and residuals, by tokens."""

    pipeline_parallel_size: Ranks = 1
    """Pipeline stages: each rank of a pipeline holds some of the layers."""

    num_virtual_stages: Layers = 1
    """Virtual stages of each pipeline rank: more make shorter bubbles and more messages."""

    num_layers_in_first_stage: Layers | None = None
    """Layers of the first pipeline rank, which also has the embedding; null: as many as each rank
    in between. For models whose layers do not divide, as the 94 of Qwen3-235B-A22B."""

    num_layers_in_last_stage: Layers | None = None
    """Layers of the last pipeline rank, which also has the output embedding; null: likewise."""

    context_parallel_size: Ranks = 1
    """Ranks that share the tokens of each row, and gather keys and values in attention: for rows
    too long for one rank. They also share the max_tokens_per_microbatch of a micro-batch."""

    expert_parallel_size: Ranks = 1
    """Ranks that divide the experts of a layer; they have other rows or other tokens."""

    expert_tensor_parallel_size: Ranks = 1
    """Ranks that split the matrices of one expert."""

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """Kernels of a layer: TransformerEngine's, or megatron-core's own. ``auto`` is
    TransformerEngine where it is installed, on CUDA."""

    attention: Literal["auto", "packed", "transformer_engine"] = "auto"
    """Attention kernel over packed rows: FSDP2's (``packed``, chosen by ``model.attention``), or
    TransformerEngine's, which needs its layers. ``auto`` is TransformerEngine's with its layers, on
    CUDA in bfloat16, unless ``model.attention`` asks for another kernel."""

    load_balance_coefficient: NotNegative = 0.0
    """Weight of the load-balance loss of mixture-of-experts layers (arXiv:2006.16668), summed over
    layers; 0 only measures it. See docs/mixture-of-experts.md."""

    transformer_args: Arguments = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig by their names, as fp8; passed on
    unchanged. Fields that have a key here are refused."""

    optimizer_args: Arguments = field(default_factory=dict)
    """Further fields of its OptimizerConfig, as optimizer_cpu_offload; likewise."""

    ddp_args: Arguments = field(default_factory=dict)
    """Further fields of its DistributedDataParallelConfig, as bucket_size; likewise."""

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...] | None:
        """Return how many of all layers each pipeline rank has; None where they do not divide."""
        size, num_virtual = self.pipeline_parallel_size, self.num_virtual_stages
        first, last = self.num_layers_in_first_stage, self.num_layers_in_last_stage
        ends = [end for end in (first, last) if end is not None]
        num_between, left = size - len(ends), num_layers - sum(ends)
        is_odd = size == 1 and ends  # megatron-core does not split a single rank
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
