"""The training back end on PyTorch's FSDP2: gloo on CPUs, NCCL on GPUs, or one process.

Legend: S scored (response) tokens of a micro-batch, R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybridrl.config.actor import ActorConfig, ModelKind
from hybridrl.config.model import ModelConfig
from hybridrl.diagnostics import trace
from hybridrl.errors import ModelError
from hybridrl.metrics import Metrics, merge
from hybridrl.models.adapter_names import ADAPTER_NAME, file_name, hf_name, is_adapter_name
from hybridrl.models.architecture import read_architecture
from hybridrl.models.experts import StoredNames
from hybridrl.models.image_settings import read_image_settings
from hybridrl.models.packed_model import PackedModel
from hybridrl.workers.train.backend import (
    Backend,
    Compute,
    LossOf,
    StepOutcome,
    as_columns,
    choose_kernel,
)
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.context_parallel import ContextParallel
from hybridrl.workers.train.export import Configuration, configs_of
from hybridrl.workers.train.microbatcher import MicroBatcher, MicroBatches
from hybridrl.workers.train.optimizer import GuardedAdamW
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.shard_spec import RankShards
from hybridrl.workers.train.shards import (
    build_model,
    full_tensor,
    local_shard,
    stored_shards,
)

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


class FSDP2Backend(Backend):
    """A Hugging Face model in shards.

    With more than one rank the process group is initialised before; its timeout bounds every
    collective here.

    Args:
        num_total_steps: optimizer steps of the run, where the schedule ends; None does not learn.
        adapter: learns instead of the policy's weights, in float32.
        context: the ranks that share the tokens of this rank's rows; None: it has all of them.
    """

    model: PackedModel  # all weights, or this rank's shards if it is an ``FSDPModule``

    def __init__(  # noqa: PLR0913 - each is a choice of build.py
        self,
        folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        device: torch.device,
        num_total_steps: int | None = None,
        adapter: Adapter | None = None,
        kind: ModelKind = "policy",
        context: ContextParallel | None = None,
    ) -> None:
        self.folder = folder
        self.device = device
        self.adapter = adapter
        ranks = Ranks(device)  # have shards of the weights
        self.data_ranks = ranks if context is None else context.rows
        self.is_output_rank = context is None or context.tokens.rank == 0
        self._context = context
        self._config = config
        learns = num_total_steps is not None
        replays = config.replay_routing and learns and kind == "policy"
        architecture = read_architecture(folder)
        self.routed = architecture if replays else None
        self.batcher = MicroBatcher(
            kernel=choose_kernel(model_config.attention, config.compute_dtype, device),
            max_tokens=config.max_tokens_per_microbatch,
            has_states=architecture.delta_net is not None,
            counts_patches=learns and not model_config.freeze_vision,
            ranks=self.data_ranks,
            device=device,
            share=None if context is None else context.share(architecture.num_heads),
            images=read_image_settings(folder),
        )
        self.model = build_model(
            folder,
            config=config,
            model_config=model_config,
            ranks=ranks,
            is_trainable=learns,
            adapt=None if adapter is None else adapter.inject,
            kind=kind,
        )
        self._names = StoredNames(self.model.hf.config.model_type)
        self._optimizer: GuardedAdamW | None = None
        if num_total_steps is not None:
            self.model.train()
            if config.gradient_checkpointing:
                recompute_blocks(self.model.hf)
            self._optimizer = GuardedAdamW(
                (parameter for parameter in self.model.parameters() if parameter.requires_grad),
                config=config.optimizer,
                num_total_steps=num_total_steps,
                ranks=ranks,
            )

    @property
    def optimizer(self) -> GuardedAdamW:
        """See ``Backend``."""
        if self._optimizer is None:
            raise ModelError(f"the model of {self.folder} was built without an optimizer")
        return self._optimizer

    @torch.no_grad()
    def forward(self, microbatches: MicroBatches, compute: Compute, *, num_columns: int) -> Tensor:
        """See ``Backend``."""
        columns = torch.zeros(num_columns, microbatches.num_values)
        try:
            for microbatch in microbatches:
                output = compute(self.model, microbatch.tokens)
                columns[:, microbatch.token_index_S] = as_columns(output, num_columns).cpu()
        finally:  # after an error, too: no backward pass frees the weights that were gathered
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self._context is None:
            return columns
        # A few columns at a time are on the device: a teacher's may be as many as the vocabulary.
        parts = [
            self._context.tokens.sum(c.to(self.device)).cpu() for c in torch.split(columns, 64)
        ]
        return torch.cat(parts)

    def train_step(
        self, microbatches: MicroBatches, compute: Compute, loss_of: LossOf
    ) -> StepOutcome:
        """See ``Backend``."""
        self.optimizer.drop_gradients()  # of an update whose loss failed
        total_loss = torch.zeros((), device=self.device)
        metrics: list[Metrics] = []
        for microbatch in trace.each("microbatch", microbatches):
            share, of_loss = loss_of(microbatch, compute(self.model, microbatch.tokens))
            torch.autograd.backward(share)
            total_loss += share.detach()
            metrics.append(of_loss)
        loss_metrics = merge(metrics)
        if self._context is not None:
            loss_metrics = self._context.tokens.merge(loss_metrics)
        result = self.optimizer.step(total_loss)
        return StepOutcome(result, loss_metrics if self.is_output_rank else {})

    def weight_specs(self, weight_set: WeightSet) -> tuple[WeightSpec, ...]:
        """See ``Backend``."""
        return tuple(
            WeightSpec(stored, tuple(shape), shape.numel() * p.element_size())
            for name, p in self._weights(weight_set)
            for stored, shape in self._names.shapes(name, p.shape)
        )

    def full_weights(self, weight_set: WeightSet, dtype: torch.dtype | None) -> NamedTensors:
        """See ``Backend``.

        Without shards a tensor may be the live weight. Matrices of experts are views of what was
        gathered.
        """
        if weight_set is WeightSet.BASE and WeightSet.ADAPTER not in self.weight_sets:
            yield from self.merged_weights(dtype)
            return
        for name, parameter in self._weights(weight_set):
            yield from self._names.views(name, full_tensor(parameter, dtype=dtype))

    def merged_weights(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """See ``Backend``."""
        parameters = dict(self.model.hf.named_parameters())
        for name, parameter in parameters.items():
            if is_adapter_name(name):
                continue
            layer = name.removesuffix("base_layer.weight")
            if self.adapter is not None and layer != name:
                matrices = [parameters[f"{layer}lora_{m}.{ADAPTER_NAME}.weight"] for m in "AB"]
                a_RI, b_OR = (full_tensor(matrix) for matrix in matrices)
                weight = self.adapter.merge(full_tensor(parameter), a_RI, b_OR)
            else:
                weight = full_tensor(parameter, dtype=dtype)
            yield from self._names.views(hf_name(name), weight)

    def hf_configs(self) -> Sequence[Configuration]:
        """See ``Backend``."""
        return configs_of(self.model.hf)

    def without_adapter(self) -> AbstractContextManager[None]:
        """See ``Backend``."""
        return nullcontext() if self.adapter is None else self.adapter.switched_off()

    def tensors(self, state: TrainState) -> list[Tensor]:
        """See ``Backend``."""
        if self._config.fsdp2.cpu_offload:  # all tensors are on the host between computations
            return []
        if state is TrainState.PARAMETERS:
            return [local_shard(parameter.detach()) for parameter in self.model.parameters()]
        if self._optimizer is None:
            return []
        is_gradients = state is TrainState.GRADIENTS
        return self._optimizer.gradients() if is_gradients else self._optimizer.state()

    def checkpoint_tensors(self) -> dict[str, RankShards]:
        """See ``Backend``."""
        optimizer = self.optimizer
        learning = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        tensors: dict[str, RankShards] = {}
        for name, parameter in learning.items():
            tensors |= stored_shards("model.", name, parameter, parameter, self._names)
        for name, parameter in learning.items():
            for key, value in optimizer.adamw.state.get(parameter, {}).items():
                prefix = f"optimizer.{key}."
                tensors |= stored_shards(prefix, name, parameter, value, self._names)
        return tensors

    def end_restore(self) -> None:
        """Do nothing: the live tensors were filled."""

    def _weights(self, weight_set: WeightSet) -> list[tuple[str, nn.Parameter]]:
        is_adapter = weight_set is WeightSet.ADAPTER
        rename = file_name if is_adapter else hf_name
        named = self.model.hf.named_parameters()
        return [(rename(name), p) for name, p in named if is_adapter_name(name) == is_adapter]


def recompute_blocks(model: PreTrainedModel) -> None:
    """Keep the inputs of each block alone, and compute it again in the backward pass."""
    old_name = "gradient_checkpointing_enable"  # until transformers 5.22
    is_renamed = hasattr(model, "activation_checkpointing_enable")
    enable = getattr(model, "activation_checkpointing_enable" if is_renamed else old_name)
    enable({"use_reentrant": False})
