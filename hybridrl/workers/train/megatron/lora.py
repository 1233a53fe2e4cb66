"""LoRA on megatron-core: matrices beside the parallel layers of this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.architecture import Architecture
from hybridrl.workers.train.megatron.adapted_layers import LayerAdapter
from hybridrl.workers.train.megatron.context import Duty
from hybridrl.workers.train.megatron.hf_tensors import adapter_tensors, hf_tensors
from hybridrl.workers.train.megatron.megatron_core import COLUMN_PARALLEL, ROW_PARALLEL
from hybridrl.workers.train.megatron.model import PolicyStage
from hybridrl.workers.train.megatron.shard_map import ShardMap, global_name
from hybridrl.workers.train.megatron.transformer import adapting_duty
from hybridrl.workers.train.protocol import WeightSpec
from hybridrl.workers.train.shard_spec import full_range, relative_slices

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


class StageAdapter:
    """A and B beside the layers of this rank; only they learn, in float32.

    Raises:
        ModelError: the adapter does not fit the model.
    """

    duty: Duty

    def __init__(self, adapter: Adapter, architecture: Architecture) -> None:
        adapter.check_fit(_linear_layers(architecture), model=architecture.model_type)
        self.duty = adapting_duty(architecture, adapter.config)
        self._adapter = adapter
        self._architecture = architecture
        self._layers: dict[str, LayerAdapter] = {}

    def inject(self, stage: PolicyStage) -> None:
        """Freeze a stage and put A and B beside its layers, without values."""
        stage.requires_grad_(requires_grad=False)
        for name, layer in list(stage.decoder.named_modules(prefix="decoder")):
            if not isinstance(layer, (*COLUMN_PARALLEL, *ROW_PARALLEL)):
                continue
            weight_name = global_name(f"{name}.weight", stage.first_layer)
            weight = stage.decoder.get_parameter(f"{name.removeprefix('decoder.')}.weight")
            shards = ShardMap(self._architecture, stage.parallel.rank).shards_of(
                weight_name, weight.shape
            )
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
        """Check that layers took all matrices of the adapter.

        Raises:
            ModelError: a layer lacks one.
        """
        lora = self._adapter.config
        expected = adapter_tensors(self._architecture, lora.modules, lora.rank)
        missing = expected.keys() - {spec.name for spec in specs}
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


def _linear_layers(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of all linear layers by their Hugging Face names."""
    shapes = hf_tensors(architecture).items()
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes
        if len(shape) == 2
    }
