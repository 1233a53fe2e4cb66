"""This rank's stages of a model on megatron-core, as the ``megatron`` section divides it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import nn

from hybridrl.config.actor import ActorConfig, CriticConfig
from hybridrl.models.architecture import Architecture
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.backend import choose_kernel
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.layers import mark_shards
from hybridrl.workers.train.megatron.load import load_weights
from hybridrl.workers.train.megatron.lora import StageAdapter
from hybridrl.workers.train.megatron.model import CriticStage, PackedStage, PolicyStage
from hybridrl.workers.train.megatron.parallel import start_parallel
from hybridrl.workers.train.megatron.shard_map import ShardMap, global_name, is_of_adapter
from hybridrl.workers.train.megatron.transformer import (
    choose_kernels,
    log_warnings_once,
    token_multiple,
    transformer_config,
)
from hybridrl.workers.train.microbatcher import MicroBatcher


class Stages:
    """The layers of this rank: one stage of a pipeline, or several virtual ones.

    Parameters have no values before ``fill``; until then they may move into other memory.

    Args:
        architecture: of the full model.
        config: types and token budget. An actor's makes a policy, a critic's a value model.
        is_reward_model: makes a value model, whose head has a bias if that of the files has one.

    Raises:
        ConfigError: megatron-core rejects ``megatron.transformer_args``.
    """

    models: list[PackedStage]
    """In the order in which micro-batches go through them."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        config: ActorConfig | CriticConfig,
        context: MegatronContext,
        duty: Duty,
        adapter: StageAdapter | None,
        is_reward_model: bool = False,
    ) -> None:
        megatron, device = context.megatron, context.device
        self._config = config
        self._adapter = adapter
        self._is_reward_model = is_reward_model
        self.parallel = start_parallel(context)
        self.shard_map = ShardMap(architecture, self.parallel.rank)
        kernels = choose_kernels(architecture, context, config, duty=duty)
        self.transformer = transformer_config(architecture, context, config, kernels=kernels)
        if dist.get_rank() == 0:
            log_warnings_once(megatron, device)
        num_virtual = megatron.num_virtual_stages
        self.batcher = MicroBatcher(
            kernel="varlen"
            if kernels.has_attention
            else choose_kernel(context.model.attention, config.compute_dtype, device),
            max_tokens=config.max_tokens_per_microbatch,
            ranks=self.parallel.data,
            device=device,
            multiple=token_multiple(self.transformer),
            share=self.parallel.token_share,
            group_size=megatron.pipeline_parallel_size if num_virtual > 1 else 1,
        )
        self.models = [
            self._build(number).to(device)
            for number in (range(num_virtual) if num_virtual > 1 else [None])
        ]
        for model in self.models:
            mark_shards(model)

    def fill(self, folder: Path) -> None:
        """Give parameters their values from the Hugging Face folder of this architecture."""
        load_weights(dict(self.named_tensors()), WeightFiles(folder), self.shard_map)
        if self._adapter is not None:
            self._adapter.fill(self.adapter_tensors(), self.shard_map)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under megatron-core's names with global layer numbers."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield global_name(name, model.first_layer), parameter

    def model_tensors(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that a Hugging Face folder contains."""
        return {name: p for name, p in self.named_tensors() if not is_of_adapter(name)}

    def adapter_tensors(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that an adapter's folder contains."""
        return {name: p for name, p in self.named_tensors() if is_of_adapter(name)}

    def _build(self, vp_stage: int | None) -> PackedStage:
        architecture = self.shard_map.architecture
        if self._is_reward_model or isinstance(self._config, CriticConfig):
            return CriticStage(
                self.transformer,
                architecture,
                self.parallel,
                vp_stage=vp_stage,
                has_bias=not self._is_reward_model or architecture.classifier == "token",
            )
        stage = PolicyStage(
            self.transformer,
            architecture,
            self.parallel,
            vp_stage=vp_stage,
            chunk_tokens=self._config.logprob_chunk_tokens,
        )
        if self._adapter is not None:
            self._adapter.inject(stage)
        return stage
