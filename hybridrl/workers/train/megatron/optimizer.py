"""AdamW on megatron-core's distributed optimizer, behind our schedule, clip and guard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.config.actor import ActorConfig
from hybridrl.workers.train.megatron.checkpoint import MOMENTS, OwnedSpan
from hybridrl.workers.train.megatron.configuration import optimizer_config
from hybridrl.workers.train.megatron.megatron_core import (
    ChainedOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    HybridDeviceOptimizer,
    ProcessGroupCollection,
    TransformerConfig,
    finalize_model_grads,
    get_megatron_optimizer,
)
from hybridrl.workers.train.megatron.parallel import Parallel
from hybridrl.workers.train.optimizer import GuardedOptimizer


def use_gradient_buffers(
    stages: Sequence[nn.Module], transformer: TransformerConfig, ddp: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Move parameters into flat buffers, and let megatron-core sum their gradients."""
    replicas = [
        DistributedDataParallel(
            config=transformer, ddp_config=ddp, module=stage, disable_bucketing=number > 0
        )
        for number, stage in enumerate(stages)
    ]
    transformer.finalize_model_grads_func = _sum_gradients
    if ddp.overlap_grad_reduce:
        no_sync = [replica.no_sync for replica in replicas]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return replicas


def _sum_gradients(
    stages: Sequence[nn.Module],
    _num_tokens: Tensor | None,
    *,
    pg_collection: ProcessGroupCollection,
    force_all_reduce: bool,
) -> None:
    """Add gradients of all ranks without dividing them: the end of a backward pass."""
    finalize_model_grads(
        stages, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )


class GradientBuffers:
    """The flat buffers in which gradients are summed. They take memory only within a step."""

    def __init__(self, stages: Sequence[DistributedDataParallel]) -> None:
        self._stages = stages
        self.tensors = [
            buffer.grad_data
            for stage in stages
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
        ]
        self._sizes = [data.untyped_storage().nbytes() for data in self.tensors]

    def allocate(self) -> None:
        """Allocate the buffers, filled with zeros."""
        for data, size in zip(self.tensors, self._sizes, strict=True):
            data.untyped_storage().resize_(size)
        for stage in self._stages:
            # Reset the counters and handles of a backward pass that failed half-way.
            for group in (*stage.bucket_groups, *stage.expert_parallel_bucket_groups):
                if len(group.per_param_grad_ready_counts) < len(group.params):
                    group.per_param_grad_ready_counts = {}
                    group.grad_reduce_handle = None
            stage.zero_grad_buffer()

    def free(self) -> None:
        """Free the memory. Twice is a no-op."""
        for data in self.tensors:
            data.untyped_storage().resize_(0)


class WeightGather:
    """Weights that a step changed, on their way to all data-parallel ranks.

    With ``overlap_param_gather`` a step leaves them on the rank that changed them. The first layers
    of the next step compute while the weights of later layers arrive. Other readers call
    ``finish`` first.
    """

    def __init__(self, stages: Sequence[DistributedDataParallel]) -> None:
        self._stages = [stage for stage in stages if stage.use_forward_hook]
        self._is_pending = False
        for stage in self._stages:
            stage.disable_forward_pre_hook(param_sync=False)

    def postpone(self) -> None:
        """Note that a step changed this rank's share of the weights."""
        self._is_pending = bool(self._stages)

    def finish(self) -> None:
        """Gather the weights on all ranks; a collective call if a step changed them."""
        if self._is_pending:
            for stage in self._stages:
                stage.start_param_sync(force_sync=True)
        self._is_pending = False

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Let each layer wait for its own weights, in the passes of a step."""
        if not self._is_pending:
            yield
            return
        for stage in self._stages:
            stage.enable_forward_pre_hook()
        try:
            yield
            self._is_pending = False
        finally:
            for stage in self._stages:
                stage.disable_forward_pre_hook(param_sync=False)


_MASTER = "master_param"


class OptimizerState:
    """Masters and moments of the elements that this rank steps, in a distributed optimizer.

    Megatron-core keeps them in one of three ways:

    - float32 shards that are AdamW's own parameters: the usual one;
    - ``optimizer_cpu_offload``: a HybridDeviceOptimizer, whose inner optimizers step float32
      copies, a share of them on the host;
    - ``use_precision_aware_optimizer`` without offload: TransformerEngine's AdamW, which has
      float32 masters, and moments of the type that is asked for, in its state.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._adamw: Any = optimizer.optimizer
        self._is_hybrid = isinstance(self._adamw, HybridDeviceOptimizer)
        self._has_masters_inside = (
            optimizer.config.use_precision_aware_optimizer and not self._is_hybrid
        )
        if self._has_masters_inside:
            for shard in self.shards():  # else they would be made in the first step
                self._adamw.initialize_state(shard, False)  # noqa: FBT003 - float32 masters

    def shards(self) -> list[Tensor]:
        """Return this rank's spans of parameters, as megatron-core steps them."""
        return [shard for group in self._adamw.param_groups for shard in group["params"]]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all shards that have one."""
        gradients = []
        for shard in self.shards():
            # A gradient of another type than its parameter has an attribute of its own.
            gradient = getattr(shard, "decoupled_grad", None)
            gradient = shard.grad if gradient is None else gradient
            if gradient is not None:
                gradients.append(gradient)
        return gradients

    def master(self, shard: Tensor) -> Tensor:
        """Return a shard's float32 values that a step changes."""
        if self._has_masters_inside and shard.dtype != torch.float32:
            master: Tensor = self._adamw.state[shard][_MASTER]
            return master
        return self._inner(shard)

    def moments(self, shard: Tensor) -> dict[str, Tensor]:
        """Return AdamW's moments of a shard by name; empty before the first step."""
        inner = self._inner(shard)
        for adamw in self._stepping():
            if inner in adamw.state:
                state = adamw.state[inner]
                return {key: state[key] for key in MOMENTS if key in state}
        return {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield all shards, masters and moments; some tensors may come twice."""
        for shard in self.shards():
            yield from (shard, self.master(shard), *self.moments(shard).values())

    def begin(self, num_steps: int) -> None:
        """Go to ``num_steps``, with moments of 0 for the caller to fill."""
        for adamw in self._stepping():
            for group in adamw.param_groups:
                group.pop("step", None)
                if num_steps and not isinstance(adamw, torch.optim.AdamW):
                    group["step"] = num_steps  # TransformerEngine's counts by groups
                for inner in group["params"]:
                    self._begin_one(adamw, inner, num_steps)

    def write_back(self) -> None:
        """Copy the restored masters to the parameters that compute."""
        if self._is_hybrid or self._has_masters_inside:
            for shard in self.shards():
                shard.data.copy_(self.master(shard))
        self._optimizer._copy_main_params_to_model_params()

    def _begin_one(self, adamw: Any, inner: Tensor, num_steps: int) -> None:  # noqa: ANN401
        if self._has_masters_inside:
            for key in MOMENTS:
                adamw.state[inner][key].zero_()
            return
        adamw.state.pop(inner, None)
        if num_steps:
            adamw.state[inner] = {key: torch.zeros_like(inner) for key in MOMENTS}
            if isinstance(adamw, torch.optim.AdamW):
                adamw.state[inner]["step"] = torch.tensor(float(num_steps))

    def _inner(self, shard: Tensor) -> Tensor:
        if not self._is_hybrid:
            return shard
        inner: Tensor = self._adamw.param_to_inner_param[shard]
        return inner

    def _stepping(self) -> list[Any]:
        return list(self._adamw.sub_optimizers) if self._is_hybrid else [self._adamw]


class DistributedAdamW(GuardedOptimizer):
    """The optimizer of megatron-core.

    Each data-parallel rank has moments, and float32 masters of weights in another type, of an equal
    share of the weights (arXiv:1910.02054); a step ends with weights gathered on all.
    """

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        *,
        config: ActorConfig,
        num_total_steps: int,
        parallel: Parallel,
    ) -> None:
        super().__init__(config.optimizer, num_total_steps=num_total_steps)
        self._parallel = parallel
        self._stages = stages
        self.buffers = GradientBuffers(stages)
        self.gather = WeightGather(stages)
        self._chained: ChainedOptimizer = get_megatron_optimizer(
            optimizer_config(config, parallel.config),
            list(stages),
            use_gloo_process_groups=False,
        )
        # Where only experts learn, the optimizer of the other layers is an empty shell.
        self._optimizers = [
            (optimizer, OptimizerState(optimizer))
            for optimizer in self._chained.chained_optimizers
            if not optimizer.is_stub_optimizer
        ]
        self.buffers.free()

    def gradients(self) -> list[Tensor]:
        """See ``GuardedOptimizer``."""
        return [grad for _, state in self._optimizers for grad in state.gradients()]

    def drop_gradients(self) -> None:
        """See ``GuardedOptimizer``."""
        self._chained.zero_grad(set_to_none=True)
        self.buffers.free()

    def tensors_besides(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """Return this rank's masters and moments on the device, one tensor of each storage.

        Moments exist after the first step. In float32 a weight is its own master, and left out, as
        are the tensors that ``optimizer_cpu_offload`` keeps on the host.
        """
        of_weights = {weight.untyped_storage()._cdata for weight in weights}
        by_storage = {
            tensor.untyped_storage()._cdata: tensor.detach()
            for _, state in self._optimizers
            for tensor in state.tensors()
            if tensor.device.type == self._parallel.device.type
        }
        return [tensor for storage, tensor in by_storage.items() if storage not in of_weights]

    def spans(self, names: Mapping[nn.Parameter, str]) -> Iterator[OwnedSpan]:
        """Yield the elements of each parameter that this rank steps, with the given names."""
        for optimizer, state in self._optimizers:
            for parameter in optimizer.model_param_group_index_map:
                group, order = optimizer.model_param_group_index_map[parameter]
                shard = optimizer.optimizer.param_groups[group]["params"][order]
                yield OwnedSpan(
                    name=names[parameter],
                    local_shape=tuple(parameter.shape),
                    begin=optimizer._get_model_param_range_map(parameter)["param"].start,
                    master=state.master(shard).detach(),
                    moments=state.moments(shard),
                )

    def begin_restore(self, *, num_steps: int) -> None:
        """See ``GuardedOptimizer``."""
        self.num_steps = num_steps
        for _, state in self._optimizers:
            state.begin(num_steps)

    @torch.no_grad()
    def end_restore(self) -> None:
        """Copy the restored masters to the weights of all data-parallel ranks."""
        for _, state in self._optimizers:
            state.write_back()
        for stage in self._stages:
            stage.start_param_sync(force_sync=True)
        self.gather.finish()

    def _sum_over_ranks(self, loss: Tensor) -> tuple[float, float]:
        self._chained.prepare_grads()
        total_loss = loss.double() if self._parallel.counts else torch.zeros_like(loss).double()
        dist.all_reduce(total_loss)
        grad_norm = float(self._chained.get_grad_norm())
        return total_loss.item(), grad_norm

    def _apply(self, lr: float) -> None:
        for group in self._chained.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._chained.step_with_ready_grads()
        self.gather.postpone()
