"""AdamW on megatron-core's distributed optimizer, behind our schedule, clip and guard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.config.actor import EngineConfig
from hybridrl.workers.train.mcore.megatron_core import (
    ChainedOptimizer,
    DistributedDataParallel,
    get_megatron_optimizer,
)
from hybridrl.workers.train.mcore.parallel import Parallel
from hybridrl.workers.train.mcore.training import optimizer_config
from hybridrl.workers.train.optimizer import StepResult, learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


class GradientBuffers:
    """The flat buffers in which gradients are summed. They take memory within a step alone."""

    def __init__(self, stages: Sequence[DistributedDataParallel]) -> None:
        self._stages = stages
        self._data = [
            buffer.grad_data
            for stage in stages
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
        ]
        self._sizes = [data.untyped_storage().nbytes() for data in self._data]

    def allocate(self) -> None:
        """Have memory, all zeros."""
        for data, size in zip(self._data, self._sizes, strict=True):
            data.untyped_storage().resize_(size)
        for stage in self._stages:
            _forget_broken_pass(stage)
            stage.zero_grad_buffer()

    def free(self) -> None:
        """Have no memory. Twice is a no-op."""
        for data in self._data:
            data.untyped_storage().resize_(0)

    def tensors(self) -> list[Tensor]:
        """Return the buffers, empty or not."""
        return self._data


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a parameter that this rank steps: a stretch of its flattened elements."""

    parameter: nn.Parameter

    begin: int
    """First element."""

    end: int
    """One past the last."""

    master: Tensor
    """The values that a step changes, flat; float32."""

    moments: Mapping[str, Tensor]
    """AdamW's two by name, flat; empty before the first step."""


class DistributedAdamW:
    """Takes a step of AdamW (arXiv:1711.05101), or leaves everything as it was.

    Each data-parallel rank has moments, and float32 masters of weights in another type, of an equal
    share of the weights (arXiv:1910.02054); a step ends with weights gathered on all.

    Args:
        stages: what this rank has of the model, loaded.
        config: rates, limits and types.
        num_total_steps: optimizer steps of the run, for the schedule.
        parallel: this rank's place.
    """

    num_steps: int
    """Optimizer steps taken, skipped ones not counted: the whole state of the schedule."""

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        *,
        config: EngineConfig,
        num_total_steps: int,
        parallel: Parallel,
    ) -> None:
        self._config = config.optimizer
        self._num_total_steps = num_total_steps
        self._parallel = parallel
        self._stages = stages
        self.gradients = GradientBuffers(stages)
        self._chained: ChainedOptimizer = get_megatron_optimizer(
            optimizer_config(config, parallel.config),
            list(stages),
            use_gloo_process_groups=False,
        )
        # Where experts alone learn, the optimizer of all else has nothing to do and is a shell.
        self._optimizers = [o for o in self._chained.chained_optimizers if not o.is_stub_optimizer]
        self.gradients.free()
        self.num_steps = 0

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        """Clip and apply the gradients, unless they or the loss are not finite; then drop them.

        Args:
            loss: the share of this rank's tokens, a scalar; see ``Parallel.counts``.
        """
        self._chained.prepare_grads()
        total_loss = loss.double() if self._parallel.counts else torch.zeros_like(loss).double()
        dist.all_reduce(total_loss)
        grad_norm = float(self._chained.get_grad_norm())
        lr = learning_rate(self._config, step=self.num_steps, num_total_steps=self._num_total_steps)
        is_skipped = not (math.isfinite(total_loss.item()) and math.isfinite(grad_norm))
        if not is_skipped:
            self._clip(grad_norm)
            for group in self._chained.param_groups:
                group["lr"] = lr * group["lr_mult"]
                group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
            self._chained.step_with_ready_grads()
            self.num_steps += 1
        self.drop_gradients()
        return StepResult(grad_norm, lr, is_skipped)

    def drop_gradients(self) -> None:
        """Free all gradients."""
        self._chained.zero_grad(set_to_none=True)
        self.gradients.free()

    def masters(self) -> list[Tensor]:
        """Return this rank's share of the weights, as the step changes them."""
        return [parameter for group in self._chained.param_groups for parameter in group["params"]]

    def moments(self) -> list[Tensor]:
        """Return this rank's share of the moments; empty before the first step."""
        return [
            value
            for optimizer in self._optimizers
            for state in optimizer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]

    def shares(self) -> Iterator[Share]:
        """Yield what this rank steps of each parameter; the moments are there after a step."""
        for optimizer in self._optimizers:
            for parameter in optimizer.model_param_group_index_map:
                group, order = optimizer.model_param_group_index_map[parameter]
                master = optimizer.optimizer.param_groups[group]["params"][order]
                span = optimizer._get_model_param_range_map(parameter)["param"]
                state = optimizer.optimizer.state.get(master, {})
                moments = {key: state[key] for key in MOMENTS if key in state}
                yield Share(parameter, span.start, span.end, master.detach(), moments)

    def begin_restore(self, *, num_steps: int) -> None:
        """Be where ``num_steps`` steps lead to, with moments of 0 for the caller to fill."""
        self.num_steps = num_steps
        for optimizer in self._optimizers:
            adamw = optimizer.optimizer
            adamw.state.clear()
            for group in adamw.param_groups:
                group.pop("step", None)
                if num_steps:
                    _begin_at(adamw, group, num_steps)

    @torch.no_grad()
    def end_restore(self) -> None:
        """Bring what was filled into the masters to all data-parallel ranks' weights."""
        for optimizer in self._optimizers:
            optimizer._copy_main_params_to_model_params()
        for stage in self._stages:
            stage.start_param_sync(force_sync=True)

    def _clip(self, grad_norm: float) -> None:
        grads = [master.grad for master in self.masters() if master.grad is not None]
        if grad_norm > self._config.max_grad_norm and grads:
            torch._foreach_mul_(grads, self._config.max_grad_norm / grad_norm)


def _forget_broken_pass(stage: DistributedDataParallel) -> None:
    """Drop what a backward pass that broke off half-way left counted and waiting."""
    for group in (*stage.bucket_groups, *stage.expert_parallel_bucket_groups):
        if len(group.per_param_grad_ready_counts) < len(group.params):
            group.per_param_grad_ready_counts = {}
            group.grad_reduce_handle = None


def _begin_at(adamw: torch.optim.Optimizer, group: dict[str, Any], num_steps: int) -> None:
    """Give the masters of a group moments of 0, and the number of steps that bias goes by."""
    for master in group["params"]:
        adamw.state[master] = {key: torch.zeros_like(master) for key in MOMENTS}
        if isinstance(adamw, torch.optim.AdamW):
            adamw.state[master]["step"] = torch.tensor(float(num_steps))
    if not isinstance(adamw, torch.optim.AdamW):  # TransformerEngine's counts by groups
        group["step"] = num_steps
