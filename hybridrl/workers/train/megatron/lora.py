"""LoRA on megatron-core: W x + scaling B A x beside its parallel layers (arXiv:2106.09685).

One of its layers is several Hugging Face layers (``linear_qkv`` is q_proj, k_proj and v_proj), each
with an A and a B of its own. They are sharded as W: beside a column-parallel layer ranks share the
rows of B and all have A; beside a row-parallel layer they share the columns of A.

Legend: T tokens (with sequence parallelism of this rank), I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, rms_norm

from hybridrl.config.model import LoraConfig
from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import adapter_shapes, file_name
from hybridrl.models.architecture import Architecture
from hybridrl.workers.train.megatron.architecture import Shapes
from hybridrl.workers.train.megatron.configuration import adapting_duty
from hybridrl.workers.train.megatron.context import Duty
from hybridrl.workers.train.megatron.megatron_core import (
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    WITH_NORM,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from hybridrl.workers.train.megatron.shard_map import ShardMap, global_name
from hybridrl.workers.train.protocol import WeightSpec
from hybridrl.workers.train.shard_spec import full_range, relative_slices

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter

Rows = Sequence[tuple[str, int]]
"""A rank's outputs in their order: the last component of the Hugging Face name (``q_proj``), and
the number of outputs."""

ParallelLinear: TypeAlias = Any
"""A linear layer of megatron-core or TransformerEngine, parallel by columns or rows."""


class Matrices(nn.Module):
    """A and B beside a layer that is some of a weight's outputs, float32, zeros."""

    def __init__(self, weight_OI: Tensor, num_outputs: int, rank: int) -> None:
        super().__init__()
        num_inputs, device = weight_OI.shape[1], weight_OI.device
        self.A = nn.Parameter(torch.zeros(rank, num_inputs, device=device))
        self.B = nn.Parameter(torch.zeros(num_outputs, rank, device=device))


class LayerAdapter(nn.ModuleDict):
    """The adapters beside a frozen layer, by the last component of Hugging Face names.

    It becomes the layer's ``lora``; ``rows`` are the layer's outputs on this rank.
    """

    is_active: bool = True  # adds to the outputs

    def __init__(
        self, layer: ParallelLinear, rows: Rows, *, config: LoraConfig, is_expert: bool
    ) -> None:
        num_outputs: dict[str, int] = {}
        for leaf, num_rows in rows:
            if leaf in config.modules:
                num_outputs[leaf] = num_outputs.get(leaf, 0) + num_rows
        weight_OI = layer.weight
        super().__init__(
            {leaf: Matrices(weight_OI, n, config.rank) for leaf, n in num_outputs.items()}
        )
        self._rows = rows
        self._rank, self._scaling = config.rank, config.scaling
        self._is_expert = is_expert
        self._is_sequence_parallel: bool = layer.config.sequence_parallel
        self._is_column_parallel = isinstance(layer, COLUMN_PARALLEL)
        # TransformerEngine has no public group for an expert's layer.
        self._group: ProcessGroup = getattr(layer, "_tp_group", None) or layer.tp_group
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
        by_leaf = {
            leaf: linear(own_T1R, matrices.B.to(inputs_T1I.dtype))
            for (leaf, matrices), own_T1R in zip(
                adapters.items(), torch.split(low_T1R, self._rank, dim=-1), strict=True
            )
        }
        outputs = [
            low_T1R.new_zeros(*low_T1R.shape[:-1], num_rows) if own is None else own
            for (_, num_rows), own in zip(self._rows, self._by_row(by_leaf, dim=-1), strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def merged(
        self, weight_OI: Tensor, merge: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return this rank's shard of the weight with its adapters merged, by ``merge``."""
        adapters = self._matrices()
        b_slices = self._by_row({leaf: adapters[leaf].B for leaf in adapters}, dim=0)
        weights = torch.split(weight_OI, [num_rows for _, num_rows in self._rows])
        merged = [
            rows_OI if b_OR is None else merge(rows_OI, adapters[leaf].A, b_OR)
            for (leaf, _), rows_OI, b_OR in zip(self._rows, weights, b_slices, strict=True)
        ]
        return torch.cat(merged)

    def _matrices(self) -> dict[str, Matrices]:
        return {leaf: matrices for leaf, matrices in self.items() if isinstance(matrices, Matrices)}

    def _by_row(self, by_leaf: Mapping[str, Tensor], *, dim: int) -> list[Tensor | None]:
        """Divide each leaf's tensor along ``dim``, in the order of rows; None: not adapted."""
        slices = {}
        for leaf, tensor in by_leaf.items():
            heights = [num_rows for of, num_rows in self._rows if of == leaf]
            slices[leaf] = iter(torch.split(tensor, heights, dim))
        return [next(slices[leaf]) if leaf in slices else None for leaf, _ in self._rows]

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

        ``is_shared`` is False where the layer is an expert that other ranks lack.
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


def _normed(layer: ParallelLinear, states: Tensor) -> Tensor:
    """Compute the normalised inputs of a layer that includes its norm, and does not return them."""
    wide = rms_norm(states.float(), states.shape[-1:], eps=layer.eps)
    normed: Tensor = wide.to(states.dtype) * layer.layer_norm_weight
    return normed


class StageAdapter:
    """A and B beside the layers of this rank; only they learn, in float32."""

    duty: Duty

    def __init__(self, adapter: Adapter, architecture: Architecture, tensors: Shapes) -> None:
        matrices = {n: (shape[0], shape[1]) for n, shape in tensors.items() if len(shape) == 2}
        layers = {name.removesuffix(".weight"): shape for name, shape in matrices.items()}
        adapter.check_fit(layers, model=architecture.model_type)
        self.duty = adapting_duty(architecture, adapter.config)
        self._adapter = adapter
        self._tensors = tensors
        self._layers: dict[str, LayerAdapter] = {}

    def inject(self, decoder: nn.Module, first_layer: int, shard_map: ShardMap) -> None:
        """Put A and B beside the layers of a stage, without values."""
        for name, layer in list(decoder.named_modules(prefix="decoder")):
            if not isinstance(layer, (*COLUMN_PARALLEL, *ROW_PARALLEL)):
                continue
            weight_name = global_name(f"{name}.weight", first_layer)
            weight = decoder.get_parameter(f"{name.removeprefix('decoder.')}.weight")
            shards = shard_map.shards_of(weight_name, weight.shape)
            rows = [(shard.name.split(".")[-2], shard.spec.shape[0]) for shard in shards]
            config, is_expert = self._adapter.config, ".experts." in name
            if any(leaf in config.modules for leaf, _ in rows):
                adapter = LayerAdapter(layer, rows, config=config, is_expert=is_expert)
                self._layers[weight_name] = adapter

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], shard_map: ShardMap) -> None:
        """Give this rank's part of A and B, by megatron-core's names, their first values."""
        values = self._adapter.initial_values()
        for name, tensor in tensors.items():
            flat = tensor.view(-1)
            shards = shard_map.shards_of(name, tensor.shape)
            shape = torch.Size(shards[0].spec.full_shape)  # all are of one matrix
            matrix = values.read(shards[0].name, shape=shape)
            for shard in shards:
                own = relative_slices(shard.spec.range, outer=full_range(shape))
                shard.view(flat).copy_(matrix[own])

    def require_all_adapted(self, specs: Sequence[WeightSpec]) -> None:
        """Raise a ModelError if layers did not take all matrices of the adapter."""
        expected = adapter_shapes(self._tensors, self._adapter.config)
        missing = expected.keys() - {file_name(spec.name) for spec in specs}
        if missing:
            raise ModelError(
                f"megatron-core's layers have no counterpart to {len(missing)} matrices of the "
                f"adapter, first: {min(missing)}; remove the option that replaces its layers, such "
                "as an entry of megatron.transformer_args, or train with actor=fsdp2"
            )

    def merged_with(self, weights: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
        """Return a function that reads this rank's weights and merges their adapters."""

        @lru_cache(maxsize=1)  # the shards of a weight are read one by one
        def read(name: str) -> Tensor:
            adapter = self._layers.get(name)
            if adapter is None:
                return weights[name]
            return adapter.merged(weights[name].detach(), self._adapter.merge)

        return read

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute without the adapter inside the ``with``."""
        for layer in self._layers.values():
            layer.is_active = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.is_active = True
