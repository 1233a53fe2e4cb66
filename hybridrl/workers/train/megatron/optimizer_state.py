"""Masters and moments in one of megatron-core's distributed optimizers.

It keeps masters and moments in one of three ways:

- float32 shards that are AdamW's own parameters: the usual one;
- ``optimizer_cpu_offload``: a HybridDeviceOptimizer, whose inner optimizers step float32 copies, a
  share of them on the host;
- ``use_precision_aware_optimizer`` without offload: TransformerEngine's AdamW, which has float32
  masters, and moments of the type that is asked for, in its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridrl.workers.train.megatron.checkpoint import MOMENTS
from hybridrl.workers.train.megatron.megatron_core import (
    DistributedOptimizer,
    HybridDeviceOptimizer,
)

_MASTER = "master_param"


class OptimizerState:
    """Masters and moments of the elements that this rank steps.

    Args:
        optimizer: with parameters to step.
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
