"""Optimizer steps of a model on megatron-core: the same for policy and critic.

Legend: S scored (response) tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridrl.config.actor import EngineConfig
from hybridrl.metrics import Metrics, merge
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.gradient_steps import global_weights, step_metrics
from hybridrl.workers.train.mcore.balance import LoadBalance
from hybridrl.workers.train.mcore.checkpoint import checkpoint_tensors
from hybridrl.workers.train.mcore.masters import fill_masters
from hybridrl.workers.train.mcore.megatron_core import (
    DistributedDataParallel,
    ProcessGroupCollection,
    finalize_model_grads,
)
from hybridrl.workers.train.mcore.model import PackedStage
from hybridrl.workers.train.mcore.optimizer import DistributedAdamW
from hybridrl.workers.train.mcore.schedule import Forward
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.mcore.stages import BuildStage, StagedModel
from hybridrl.workers.train.mcore.training import ddp_config
from hybridrl.workers.train.mcore.transformer import Duty
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.packs import Packs
from hybridrl.workers.train.places import CheckpointTensor
from hybridrl.workers.train.protocol import TrainState, WeightSpec


class StagedLearner(StagedModel):
    """A model with its optimizer.

    Args:
        folder: the Hugging Face folder that the model comes from.
        build: makes a stage, without values.
        config: types, token budget, activation checkpointing, optimizer.
        setting: parallel sizes and device.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        area: of its metrics, ``policy`` or ``critic``.
    """

    duty: Duty = "learns"

    optimizer: DistributedAdamW
    """Moments, and the number of steps taken."""

    constants: Metrics
    """Reported with every step."""

    def __init__(
        self,
        folder: Path,
        build: BuildStage,
        *,
        config: EngineConfig,
        setting: MegatronContext,
        num_total_steps: int,
        area: str,
    ) -> None:
        super().__init__(folder, build, config=config, setting=setting)
        self._area = area
        self.constants = {}
        self.optimizer = DistributedAdamW(
            self._replicas, config=config, num_total_steps=num_total_steps, parallel=self._parallel
        )
        fill_masters(
            self.optimizer,
            WeightFiles(folder),
            names=self._parameter_names(),
            architecture=self._architecture,
            parallel=self._parallel.rank,
        )

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        return self.optimizer.num_steps

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Name parameters that learn, and their moments; see ``LearningEngine``."""
        self._require("checkpoint_tensors()", *TrainState)
        return checkpoint_tensors(
            self.optimizer,
            names=self._parameter_names(),
            specs=self._learning_specs(),
            architecture=self._architecture,
            parallel=self._parallel.rank,
        )

    def begin_restore(self, *, num_updates: int) -> None:
        """Go to ``num_updates``, with moments that are still to be filled."""
        self.optimizer.begin_restore(num_steps=num_updates)

    def end_restore(self) -> None:
        """Let all ranks have what each has filled; a collective call."""
        self.optimizer.end_restore()

    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.named_tensors()}

    def _learning_specs(self) -> Sequence[WeightSpec]:
        """Name the whole tensors that learn."""
        return self.weight_specs()

    def _take_step(
        self,
        packs: Packs,
        forward: Forward,
        loss_share: Callable[[Pack, Tensor, Tensor], tuple[Tensor, Metrics]],
        *,
        aggregation: str,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one step, or skip it if the loss or the gradient is not finite.

        Args:
            packs: of this rank's rows.
            forward: computes a stage.
            loss_share: from a pack, the last stage's output and the weight of each scored token [S]
                to the pack's share of the global loss, and metrics.
            aggregation: how tokens weigh; see ``algorithms/aggregate.py``.
            max_response_tokens: the fixed length of one of the aggregations.
        """
        weights_B = global_weights(
            packs.response_lengths_B,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
            ranks=self._data_ranks,
        )

        def finish(pack: Pack, output: Tensor) -> tuple[Tensor, tuple[Tensor, Metrics]]:
            weights_S = weights_B[pack.row_S].to(self._device)
            share, metrics = loss_share(pack, output, weights_S)
            return share, (share.detach().clone(), metrics)

        self.optimizer.drop_gradients()  # of an update that a loss broke off
        self.optimizer.gradients.allocate()
        balance = self._balance(packs)
        with self.optimizer.gather.in_background():
            found = self._schedule.train(packs, forward, finish)
        total_loss = torch.zeros((), device=self._device)
        for share, _ in found:
            total_loss += share
        result = self.optimizer.step(total_loss)
        counts = self.leads and self.dp_rank == 0
        told = step_metrics(result, area=self._area, counts=counts)
        if balance is not None and self._area == "policy":
            told |= balance.metrics()
        of_rows: Metrics = {}
        if self._parallel.counts:
            mine = merge(metrics for _, metrics in found)
            of_rows = self._parallel.ranks_with_other_tokens().merge(mine)
        return merge([of_rows if self.leads else {}, self.constants | told])

    def _balance(self, packs: Packs) -> LoadBalance | None:
        """Begin to measure how tokens fall on experts, if there are any; a collective call."""
        experts = self._architecture.experts
        if experts is None:
            return None
        balance = LoadBalance(
            experts,
            coefficient=self._parallel.config.load_balance_coefficient,
            num_tokens=int(self._data_ranks.gather([packs.num_tokens]).sum()),
            device=self._device,
        )
        for model in self._models:
            model.balance = balance
        return balance

    def _wrap(self, models: list[PackedStage], config: EngineConfig) -> list[nn.Module]:
        sums = ddp_config(config, self._parallel.config, self._device, duty=self.duty)
        self._replicas = [
            DistributedDataParallel(
                config=self._transformer,
                ddp_config=sums,
                module=model,
                disable_bucketing=number > 0,
            )
            for number, model in enumerate(models)
        ]
        self._transformer.finalize_model_grads_func = _sum_gradients
        if sums.overlap_grad_reduce:
            no_sync = [replica.no_sync for replica in self._replicas]
            self._transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return list(self._replicas)

    def _settle(self) -> None:
        self.optimizer.gather.finish()

    def _tensors(self, part: TrainState) -> list[Tensor]:
        if part is TrainState.GRADIENTS:
            return self.optimizer.gradients.tensors()
        if part is TrainState.PARAMETERS:
            self._settle()
            return super()._tensors(part)
        weights = super()._tensors(TrainState.PARAMETERS)
        known = {tensor.untyped_storage()._cdata for tensor in weights}
        # In float32 a weight is its own master, and no part of the optimizer's memory. What
        # optimizer_cpu_offload keeps lies on the host already.
        held = {
            tensor.untyped_storage()._cdata: tensor.detach()
            for tensor in self.optimizer.state_tensors()
            if tensor.device.type == self._device.type
        }
        return [tensor for storage, tensor in held.items() if storage not in known]


def _sum_gradients(
    models: Sequence[nn.Module],
    _num_tokens: Tensor | None,
    *,
    pg_collection: ProcessGroupCollection,
    force_all_reduce: bool,
) -> None:
    """Add gradients of all ranks, and divide them by nothing: the last act of a backward pass."""
    finalize_model_grads(
        models, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
