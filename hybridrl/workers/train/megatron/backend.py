"""The training back end on megatron-core.

Legend: S scored (response) tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig

from hybridrl.config.actor import ActorConfig, ModelKind
from hybridrl.diagnostics import activity, trace
from hybridrl.errors import ModelError
from hybridrl.metrics import Metrics, merge
from hybridrl.models.adapter_names import file_name
from hybridrl.models.load import (
    WeightFiles,
    build_empty_critic,
    build_empty_reward_model,
    load_model_config,
)
from hybridrl.models.model_folder import GENERATION
from hybridrl.workers.train.backend import (
    Backend,
    Compute,
    LossOf,
    Output,
    StepOutcome,
    as_columns,
)
from hybridrl.workers.train.export import Configuration
from hybridrl.workers.train.megatron.architecture import hf_tensors, megatron_architecture
from hybridrl.workers.train.megatron.checkpoint import OwnedSpan, checkpoint_tensors, fill_masters
from hybridrl.workers.train.megatron.configuration import ddp_config
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.export import WeightExport
from hybridrl.workers.train.megatron.lora import StageAdapter
from hybridrl.workers.train.megatron.megatron_core import get_forward_backward_func, parallel_state
from hybridrl.workers.train.megatron.model import Stages
from hybridrl.workers.train.megatron.optimizer import DistributedAdamW, use_gradient_buffers
from hybridrl.workers.train.megatron.routing import LoadBalance
from hybridrl.workers.train.microbatcher import MicroBatch, MicroBatches
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.shard_spec import RankShards

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


_OF_LAST_TOKENS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")

Taken = TypeVar("Taken")  # the result of each micro-batch, on the last stage


class Schedule:
    """Runs micro-batches through the stages of this rank, by megatron-core's schedules.

    Without pipeline parallelism that is a loop; with it 1F1B, or the interleaved schedule where
    there are several virtual stages, given in order (arXiv:2104.04473). ``max_tokens`` are those of
    a micro-batch, usually.
    """

    def __init__(self, stages: Sequence[nn.Module], *, max_tokens: int) -> None:
        self.stages = list(stages)
        self._max_tokens = max_tokens

    def run(
        self,
        microbatches: MicroBatches,
        compute: Compute,
        finish: Callable[[MicroBatch, Tensor], tuple[Tensor, Taken]],
        *,
        is_training: bool,
    ) -> list[Taken]:
        """Compute forward and, in training, backward; gradients are *summed*, over ranks too.

        Micro-batches are the same on all ranks that share a model, and laid out one by one.
        ``finish`` computes from the last stage's output a scalar and a further result. Returns the
        further results, by micro-batch, on the last stage; elsewhere an empty list.
        """

        def finish_one(microbatch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Taken]:
            result, taken = finish(microbatch, output)
            # With 0 tokens megatron-core does not divide: weights are shares of the global loss.
            return result, torch.zeros((), dtype=torch.int, device=output.device), taken

        def step(
            remaining: Iterator[MicroBatch], stage: nn.Module
        ) -> tuple[Output, Callable[[Tensor], tuple[Tensor, Tensor, Taken]]]:
            microbatch = next(remaining)
            return compute(stage, microbatch.tokens), partial(finish_one, microbatch)

        traced = iter(trace.each("microbatch", microbatches))
        for stage in self.stages:
            stage.train(is_training)
        try:
            with torch.set_grad_enabled(is_training):
                all_taken: list[Taken] = get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=[traced, *(iter(microbatches) for _ in self.stages[1:])],
                    model=self.stages,
                    num_microbatches=len(microbatches),
                    seq_length=self._max_tokens,
                    micro_batch_size=1,
                    forward_only=not is_training,
                )
        finally:
            for stage in self.stages:
                stage.train()
            self._forget_tokens()
        next(traced, None)  # ends the last one's span
        return all_taken

    def _forget_tokens(self) -> None:
        """Drop what megatron-core keeps of the last micro-batch, beside the KV cache else.

        Sequence-parallel gathers keep their largest result: 136 MiB for 17,406 tokens of Qwen3-8B.
        A dispatcher keeps its layer's routes, and with them the graph behind: 37 MiB for each layer
        of Qwen3-30B-A3B.
        """
        parallel_state.get_global_memory_buffer().buffer.clear()
        modules = (module for stage in self.stages for module in stage.modules())
        for dispatcher in (vars(module).get("token_dispatcher") for module in modules):
            if dispatcher is not None:
                kept = vars(dispatcher)
                kept.update({name: None for name in _OF_LAST_TOKENS if name in kept})


class MegatronBackend(Backend):
    """A model on megatron-core, divided as the ``megatron`` section says.

    Arguments are those of ``FSDP2Backend``; all models of a process have the same ``context``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: ActorConfig,
        context: MegatronContext,
        num_total_steps: int | None = None,
        adapter: Adapter | None = None,
        kind: ModelKind = "policy",
    ) -> None:
        self.folder = folder
        self.device = context.device
        self.adapter = adapter
        self._config = config
        self._kind = kind
        architecture, tensors = megatron_architecture(folder), hf_tensors(folder)
        learns = num_total_steps is not None
        replays = config.replay_routing and learns and kind == "policy"
        self.routed = architecture if replays else None
        duty: Duty = "scores" if num_total_steps is None else "learns"
        self._stage_adapter: StageAdapter | None = None
        if adapter is not None:
            self._stage_adapter = StageAdapter(adapter, architecture, tensors)
            duty = self._stage_adapter.duty
        self.stages = Stages(
            architecture,
            tensors,
            config=config,
            context=context,
            duty=duty,
            adapter=self._stage_adapter,
            kind=kind,
        )
        self.parallel = self.stages.parallel
        self.batcher = self.stages.batcher
        self.data_ranks = self.batcher.ranks
        self.is_output_rank = self.parallel.is_output_rank
        self._optimizer: DistributedAdamW | None = None
        modules: list[nn.Module] = [*self.stages.models]
        if num_total_steps is None:
            for module in modules:
                module.requires_grad_(requires_grad=False)
            self.stages.fill(folder)
        else:
            modules = self._prepare_to_learn(num_total_steps, duty)
        self._export = self._plan_export(self.stages.model_tensors())
        if self._stage_adapter is not None:
            self._adapter_export = self._plan_export(self.stages.adapter_tensors())
            self._stage_adapter.require_all_adapted(self._adapter_export.specs)
        self._schedule = Schedule(modules, max_tokens=config.max_tokens_per_microbatch)

    def _prepare_to_learn(self, num_total_steps: int, duty: Duty) -> list[nn.Module]:
        """Move parameters into buffers, fill them, make the optimizer; return the replicas."""
        stages = self.stages
        ddp = ddp_config(self.parallel.config, self.device, duty=duty)
        replicas = use_gradient_buffers(stages.models, stages.transformer, ddp)
        stages.fill(self.folder)
        self._optimizer = DistributedAdamW(
            replicas,
            config=self._config,
            num_total_steps=num_total_steps,
            parallel=self.parallel,
        )
        if stages.transformer.params_dtype != torch.float32:
            fill_masters(self._owned_spans(), WeightFiles(self.folder), stages.shard_map)
        return [*replicas]

    @property
    def optimizer(self) -> DistributedAdamW:
        """See ``Backend``."""
        if self._optimizer is None:
            raise ModelError(f"the model of {self.folder} was built without an optimizer")
        return self._optimizer

    def forward(self, microbatches: MicroBatches, compute: Compute, *, num_columns: int) -> Tensor:
        """See ``Backend``."""

        def finish(microbatch: MicroBatch, output: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return output, (microbatch.token_index_S, as_columns(output, num_columns))

        self._gather_weights()
        outputs = self._schedule.run(microbatches, compute, finish, is_training=False)
        columns = torch.zeros(num_columns, microbatches.num_values, device=self.device)
        for token_index_S, scores in outputs:
            columns[:, token_index_S.to(self.device)] = scores
        if self.parallel.is_last_stage:
            self.parallel.context.sum(columns)
        pipeline = self.parallel.pipeline
        if pipeline.size > 1:
            with activity.scope("broadcast", waits=True):
                dist.broadcast(columns, group=pipeline.group, group_src=pipeline.size - 1)
        return columns.cpu()

    def train_step(
        self, microbatches: MicroBatches, compute: Compute, loss_of: LossOf
    ) -> StepOutcome:
        """See ``Backend``."""
        optimizer = self.optimizer

        def finish(microbatch: MicroBatch, output: Output) -> tuple[Tensor, tuple[Tensor, Metrics]]:
            share, metrics = loss_of(microbatch, output)
            return share, (share.detach().clone(), metrics)

        optimizer.drop_gradients()  # of an update whose loss failed
        optimizer.buffers.allocate()
        balance, experts = None, self.stages.shard_map.architecture.experts
        if experts is not None:
            balance = LoadBalance(
                experts,
                coefficient=self.parallel.config.load_balance_coefficient,
                num_tokens=int(self.data_ranks.gather([microbatches.num_tokens]).sum()),
                device=self.device,
            )
            for model in self.stages.models:
                model.balance = balance
        with optimizer.gather.in_background():
            losses = self._schedule.run(microbatches, compute, finish, is_training=True)
        total_loss = torch.zeros((), device=self.device)
        for share, _ in losses:
            total_loss += share
        result = optimizer.step(total_loss)
        loss_metrics: Metrics = {}
        if self.parallel.counts:
            of_own_tokens = merge(metrics for _, metrics in losses)
            loss_metrics = self.parallel.context.merge(of_own_tokens)
        return StepOutcome(
            result,
            loss_metrics if self.is_output_rank else {},
            {} if balance is None else balance.metrics(),
        )

    def weight_specs(self, weight_set: WeightSet) -> tuple[WeightSpec, ...]:
        """See ``Backend``."""
        if weight_set is WeightSet.BASE:
            return self._export.specs
        return tuple(
            WeightSpec(file_name(spec.name), spec.shape, spec.num_bytes)
            for spec in self._adapter_export.specs
        )

    def full_weights(self, weight_set: WeightSet, dtype: torch.dtype | None) -> NamedTensors:
        """See ``Backend``; in the type that computes."""
        if weight_set is WeightSet.BASE and WeightSet.ADAPTER not in self.weight_sets:
            yield from self.merged_weights()
            return
        self._gather_weights()
        if weight_set is WeightSet.BASE:
            yield from self._export.full_weights(self.stages.model_tensors().__getitem__)
            return
        adapters = self.stages.adapter_tensors()
        for name, tensor in self._adapter_export.full_weights(adapters.__getitem__):
            yield file_name(name), tensor

    def merged_weights(self) -> NamedTensors:
        """See ``Backend``."""
        self._gather_weights()
        weights, adapter = self.stages.model_tensors(), self._stage_adapter
        read = weights.__getitem__ if adapter is None else adapter.merged_with(weights)
        yield from self._export.full_weights(read)

    def hf_configs(self) -> Sequence[Configuration]:
        """See ``Backend``."""
        folder, dtype = self.folder, self.stages.transformer.params_dtype
        meta = torch.device("meta")
        if self._kind == "reward_model":
            files = WeightFiles(folder)
            model = build_empty_reward_model(folder, files=files, dtype=dtype, device=meta)
            return [model.config]
        if self._kind == "critic":
            return [build_empty_critic(folder, dtype=dtype, device=meta).config]
        config = load_model_config(folder)
        config.dtype = dtype
        if not (folder / GENERATION).is_file():
            return [config]
        return [config, GenerationConfig.from_pretrained(folder, local_files_only=True)]

    def without_adapter(self) -> AbstractContextManager[None]:
        """See ``Backend``."""
        adapter = self._stage_adapter
        return nullcontext() if adapter is None else adapter.switched_off()

    def tensors(self, state: TrainState) -> list[Tensor]:
        """See ``Backend``."""
        weights = (parameter.detach() for _, parameter in self.stages.named_tensors())
        if state is TrainState.PARAMETERS:
            self._gather_weights()
            return [*weights]
        if self._optimizer is None:
            return []
        if state is TrainState.GRADIENTS:
            return self._optimizer.buffers.tensors
        return self._optimizer.tensors_besides(weights)

    def checkpoint_tensors(self) -> Mapping[str, RankShards]:
        """See ``Backend``."""
        export = self._export if self._stage_adapter is None else self._adapter_export
        return checkpoint_tensors(
            [*self._owned_spans()],
            {spec.name: spec.shape for spec in export.specs},
            shard_map=self.stages.shard_map,
            num_steps=self.optimizer.num_steps,
        )

    def end_restore(self) -> None:
        """Send the filled values to all data-parallel ranks; a collective call."""
        self.optimizer.end_restore()

    def _owned_spans(self) -> Iterator[OwnedSpan]:
        names = {parameter: name for name, parameter in self.stages.named_tensors()}
        return self.optimizer.spans(names)

    def _gather_weights(self) -> None:
        """Wait for weights that are gathered in the background; a collective call if they are."""
        if self._optimizer is not None:
            self._optimizer.gather.finish()

    def _plan_export(self, local: Mapping[str, Tensor]) -> WeightExport:
        return WeightExport(local, self.stages.shard_map, group=self.parallel.replica)
