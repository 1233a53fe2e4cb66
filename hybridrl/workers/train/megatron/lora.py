"""LoRA on megatron-core: matrices beside the parallel layers of this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridrl.config.architecture import Architecture
from hybridrl.errors import ModelError
from hybridrl.workers.train.megatron.adapted_layers import LayerAdapter, adapt_layer
from hybridrl.workers.train.megatron.blocks import blocks_of
from hybridrl.workers.train.megatron.hf_tensors import adapter_tensors, hf_tensors
from hybridrl.workers.train.megatron.megatron_core import COLUMN_PARALLEL, ROW_PARALLEL
from hybridrl.workers.train.megatron.model import PolicyStage
from hybridrl.workers.train.megatron.names import global_name
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from hybridrl.workers.train.megatron.transformer import Duty, adapting_duty
from hybridrl.workers.train.places import index_in
from hybridrl.workers.train.protocol import WeightSpec

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


class StageAdapter:
    """A and B beside the layers that this rank has; they alone learn, in float32.

    Args:
        adapter: rank, scaling, layers, and first values.
        architecture: of the model.

    Raises:
        ModelError: the adapter does not fit the model.
    """

    duty: Duty
    """What of the model learns."""

    def __init__(self, adapter: Adapter, architecture: Architecture) -> None:
        adapter.check_fit(_linear_layers(architecture), model=architecture.model_type)
        self.duty = adapting_duty(architecture, adapter.config)
        self._adapter = adapter
        self._architecture = architecture
        self._layers: dict[str, LayerAdapter] = {}

    def inject(self, stage: PolicyStage) -> None:
        """Freeze a stage and put A and B, still without values, beside its layers."""
        stage.requires_grad_(requires_grad=False)
        for name, layer in list(stage.decoder.named_modules(prefix="decoder")):
            if not isinstance(layer, (*COLUMN_PARALLEL, *ROW_PARALLEL)):
                continue
            weight_name = global_name(f"{name}.weight", stage.first_layer)
            blocks = blocks_of(
                weight_name,
                stage.decoder.get_parameter(f"{name.removeprefix('decoder.')}.weight").shape,
                architecture=stage.architecture,
                parallel=stage.parallel.rank,
            )
            rows = [(block.name.split(".")[-2], block.shape[0]) for block in blocks]
            is_expert = ".experts." in name
            adapter = adapt_layer(layer, rows, config=self._adapter.config, is_expert=is_expert)
            if adapter is not None:
                self._layers[weight_name] = adapter

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], parallel: ParallelRank) -> None:
        """Give this rank's part of A and B their first values.

        Args:
            tensors: of the adapter, by megatron-core's names with global layer numbers.
            parallel: this rank.
        """
        values = self._adapter.initial_values()
        for name, tensor in tensors.items():
            blocks = blocks_of(
                name, tensor.shape, architecture=self._architecture, parallel=parallel
            )
            shape = torch.Size(blocks[0].place.global_shape)  # all are of one matrix
            matrix = values.read(blocks[0].name, shape=shape, dtype=tensor.dtype)
            matrix_box = tuple((0, size) for size in shape)
            for block in blocks:
                tensor[block.begin : block.end].copy_(matrix[index_in(matrix_box, block.box)])

    def require_all_adapted(self, specs: Sequence[WeightSpec]) -> None:
        """Compare the matrices that layers took with those that the adapter has.

        Raises:
            ModelError: some are missing.
        """
        lora = self._adapter.config
        expected = adapter_tensors(self._architecture, lora.modules, lora.rank)
        missing = expected.keys() - {spec.name for spec in specs}
        if missing:
            raise ModelError(
                f"megatron-core's layers give no place to {len(missing)} matrices of the adapter, "
                f"first: {min(missing)}; take out what replaces its layers, such as an entry of "
                "megatron.transformer_args, or train with actor=fsdp2"
            )

    def merged_with(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's weights with adapters merged as they are asked for."""
        return _MergedTensors(weights, self._layers, self._adapter.merge)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute as the model that was loaded, meanwhile."""
        for layer in self._layers.values():
            layer.is_active = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.is_active = True


class _MergedTensors(Mapping[str, Tensor]):
    """This rank's weights with adapters merged as they are asked for; one is kept at a time."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        adapted: Mapping[str, LayerAdapter],
        merge: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        self._weights = weights
        self._adapted = adapted
        self._merge = merge
        self._last: tuple[str, Tensor] | None = None  # its blocks are asked for one by one

    def __getitem__(self, name: str) -> Tensor:
        adapter = self._adapted.get(name)
        if adapter is None:
            return self._weights[name]
        if self._last is None or self._last[0] != name:
            self._last = name, adapter.merged(self._weights[name].detach(), self._merge)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _linear_layers(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of all linear layers by the files' names."""
    shapes = hf_tensors(architecture).items()
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes
        if len(shape) == 2
    }
