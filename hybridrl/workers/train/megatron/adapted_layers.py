"""Adapters beside megatron-core's parallel linear layers: W x + scaling B A x (arXiv:2106.09685).

One of its layers is several Hugging Face layers (``linear_qkv`` is q_proj, k_proj and v_proj), each
with an A and a B of its own. They are sharded as W: beside a column-parallel layer ranks share the
rows of B and all have A; beside a row-parallel layer they share the columns of A.

Legend: T tokens (with sequence parallelism of this rank), I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, rms_norm

from hybridrl.config.model import LoraConfig
from hybridrl.workers.train.megatron.megatron_core import (
    COLUMN_PARALLEL,
    WITH_NORM,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

Rows = Sequence[tuple[str, int]]
"""A rank's outputs in their order: the last component of the Hugging Face name (``q_proj``), and
the number of outputs."""

ParallelLinear: TypeAlias = Any
"""A linear layer of megatron-core or TransformerEngine, parallel by columns or rows."""


class Matrices(nn.Module):
    """A and B beside one Hugging Face layer, float32, zeros."""

    def __init__(
        self, *, num_inputs: int, num_outputs: int, rank: int, device: torch.device
    ) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(rank, num_inputs, device=device))
        self.B = nn.Parameter(torch.zeros(num_outputs, rank, device=device))


class LayerAdapter(nn.ModuleDict):
    """The adapters beside one layer of megatron-core, by the last component of Hugging Face names.

    Args:
        layer: frozen; the adapter becomes its ``lora`` and adds to its outputs from now on.
        rows: the layer's outputs on this rank.
    """

    is_active: bool = True
    """Whether it adds to the outputs."""

    def __init__(
        self, layer: ParallelLinear, rows: Rows, *, config: LoraConfig, is_expert: bool
    ) -> None:
        num_outputs: dict[str, int] = {}
        for leaf, num_rows in rows:
            if leaf in config.modules:
                num_outputs[leaf] = num_outputs.get(leaf, 0) + num_rows
        weight_OI = layer.weight
        super().__init__(
            {
                leaf: Matrices(
                    num_inputs=weight_OI.shape[1],
                    num_outputs=outputs,
                    rank=config.rank,
                    device=weight_OI.device,
                )
                for leaf, outputs in num_outputs.items()
            }
        )
        self._rows = rows
        self._rank, self._scaling = config.rank, config.scaling
        self._is_expert = is_expert
        self._is_sequence_parallel: bool = layer.config.sequence_parallel
        self._is_column_parallel = isinstance(layer, COLUMN_PARALLEL)
        self._group = _ranks_of(layer)
        for matrices in self._matrices().values():
            # Some of TransformerEngine's layers lack the mark where it is true.
            self._mark(matrices, is_shared=getattr(weight_OI, "allreduce", True))
        layer.add_module("lora", self)
        layer.register_forward_hook(self._add)

    def forward(self, inputs_T1I: Tensor) -> Tensor:
        """Return scaling B A x: float [T, ..., I] to [T, ..., O], in the type of the inputs."""
        adapters = self._matrices()
        a_RI = torch.cat([matrices.A for matrices in adapters.values()]).to(inputs_T1I.dtype)
        low_T1R = linear(inputs_T1I, a_RI) * self._scaling
        if not self._is_expert:  # a dispatcher exchanges the tokens of experts
            low_T1R = self._exchange(low_T1R)
        outputs = {
            leaf: linear(own_T1R, matrices.B.to(inputs_T1I.dtype))
            for (leaf, matrices), own_T1R in zip(
                adapters.items(), torch.split(low_T1R, self._rank, dim=-1), strict=True
            )
        }
        slices = {
            leaf: iter(torch.split(output, self._heights(leaf), dim=-1))
            for leaf, output in outputs.items()
        }
        by_row = [
            next(slices[leaf])
            if leaf in slices
            else low_T1R.new_zeros(*low_T1R.shape[:-1], num_rows)
            for leaf, num_rows in self._rows
        ]
        return by_row[0] if len(by_row) == 1 else torch.cat(by_row, dim=-1)

    def merged(
        self, weight_OI: Tensor, merge: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return this rank's shard of the weight with its adapters merged.

        Args:
            merge: from W, A and B of a Hugging Face layer to W + scaling B A.
        """
        adapters = self._matrices()
        b_slices = {
            leaf: iter(torch.split(matrices.B, self._heights(leaf)))
            for leaf, matrices in adapters.items()
        }
        weights = torch.split(weight_OI, [num_rows for _, num_rows in self._rows])
        merged = [
            merge(rows_OI, adapters[leaf].A, next(b_slices[leaf])) if leaf in adapters else rows_OI
            for (leaf, _), rows_OI in zip(self._rows, weights, strict=True)
        ]
        return torch.cat(merged)

    def _matrices(self) -> dict[str, Matrices]:
        return {leaf: matrices for leaf, matrices in self.items() if isinstance(matrices, Matrices)}

    def _heights(self, leaf: str) -> list[int]:
        return [num_rows for of, num_rows in self._rows if of == leaf]

    def _add(
        self,
        layer: nn.Module,
        inputs: tuple[Tensor],
        outputs: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        if not self.is_active:
            return outputs
        outputs_T1O, bias_O = outputs
        inputs_T1I = inputs[0]
        if isinstance(layer, WITH_NORM):
            inputs_T1I = _normed(layer, inputs_T1I)
        return outputs_T1O + self(inputs_T1I), bias_O

    def _exchange(self, low_T1R: Tensor) -> Tensor:
        """Exchange A x between ranks, from the layout of A to that of B."""
        group, is_split = self._group, self._is_sequence_parallel
        exchanged: Tensor
        if self._is_column_parallel and is_split:
            exchanged = gather_from_sequence_parallel_region(
                low_T1R, tensor_parallel_output_grad=True, group=group
            )
        elif self._is_column_parallel:
            exchanged = copy_to_tensor_model_parallel_region(low_T1R, group=group)
        elif is_split:
            exchanged = reduce_scatter_to_sequence_parallel_region(low_T1R, group=group)
        else:
            exchanged = reduce_from_tensor_model_parallel_region(low_T1R, group=group)
        return exchanged

    def _mark(self, matrices: Matrices, *, is_shared: bool) -> None:
        """Mark parameters for megatron-core's sums and norms of gradients.

        Args:
            matrices: beside one Hugging Face layer.
            is_shared: False where the layer is an expert that other ranks lack.
        """
        for parameter in (matrices.A, matrices.B):
            parameter.allreduce = is_shared  # type: ignore[attr-defined]
        if not self._is_expert:
            sharded, replicated, dim = matrices.A, matrices.B, 1
            if self._is_column_parallel:
                sharded, replicated, dim = matrices.B, matrices.A, 0
            set_tensor_model_parallel_attributes(sharded, True, dim, 1)  # noqa: FBT003 - megatron's
            replicated.sequence_parallel = self._is_sequence_parallel  # type: ignore[attr-defined]
            return
        for parameter in (matrices.A, matrices.B):
            if is_shared:  # tensor-parallel ranks have the same expert, for other tokens
                parameter.sequence_parallel = self._is_sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)  # noqa: FBT003


def _ranks_of(layer: ParallelLinear) -> ProcessGroup:
    """Return the ranks that share a layer; TransformerEngine has none for an expert's."""
    group: ProcessGroup = getattr(layer, "_tp_group", None) or layer.tp_group
    return group


def _normed(layer: ParallelLinear, states: Tensor) -> Tensor:
    """Compute the normalised inputs of a layer that includes its norm, and does not return them."""
    wide = rms_norm(states.float(), states.shape[-1:], eps=layer.eps)
    normed: Tensor = wide.to(states.dtype) * layer.layer_norm_weight
    return normed
