"""The policy's training engine with LoRA on megatron-core: only adapters learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.errors import ModelError
from hybridrl.metrics import Max
from hybridrl.models.adapter import Adapter
from hybridrl.models.adapter_names import file_name
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.adapter_folder import write_adapter_folder
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.mcore.adapted_layers import LayerAdapter, adapt_layer
from hybridrl.workers.train.mcore.architecture import Architecture, read_architecture
from hybridrl.workers.train.mcore.blocks import blocks_of
from hybridrl.workers.train.mcore.engine import MegatronEngine
from hybridrl.workers.train.mcore.hf_tensors import adapter_tensors, hf_tensors
from hybridrl.workers.train.mcore.megatron_core import COLUMN_PARALLEL, ROW_PARALLEL
from hybridrl.workers.train.mcore.model import PolicyStage
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.mcore.stages import global_name
from hybridrl.workers.train.mcore.transformer import adapting_duty
from hybridrl.workers.train.places import index_in
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec


class MegatronLoraEngine(MegatronEngine):
    """A frozen policy with an adapter that learns; a ``TrainEngine``.

    Gradients and moments exist for A and B alone, which are float32; the frozen weights are in the
    type that the model computes in.

    Args:
        model_folder: Hugging Face folder of the frozen model.
        config: types, token budget, chunk size, optimizer.
        setting: parallel sizes and device.
        lora: the adapter, and how rollout engines get it.
        seed: of the adapter.
        num_total_steps: optimizer steps of the run, where the schedule ends.

    Raises:
        ModelError: the folder is not usable, or the adapter does not fit the model.
        ConfigError: see ``StagedModel``.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        setting: MegatronContext,
        lora: LoraConfig,
        seed: int,
        num_total_steps: int,
    ) -> None:
        self._lora = lora
        self._adapter = Adapter(lora, seed=seed)
        self._adapted: dict[str, LayerAdapter] = {}
        if lora.sync == "adapter":
            self.weight_parts = (WeightSet.BASE, WeightSet.ADAPTER)
        architecture = read_architecture(model_folder)
        self.duty = adapting_duty(architecture, lora)
        self._adapter.check_fit(_linear_layers(architecture), model=architecture.model_type)
        super().__init__(
            model_folder,
            config=config,
            setting=setting,
            num_total_steps=num_total_steps,
            adapt=self._adapt,
        )
        self._adapter_export = self._plan_export(self._adapter_tensors())
        self._check_all_adapted()
        num_trained = sum(math.prod(spec.shape) for spec in self._adapter_export.specs)
        self.constants = {"policy/trained_parameters": Max(num_trained)}

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        if part is WeightSet.BASE:
            return super().weight_specs(part)
        return tuple(
            WeightSpec(file_name(spec.name), spec.shape, spec.num_bytes)
            for spec in self._adapter_export.specs
        )

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight of a part whole, one at a time. Every rank must exhaust it.

        With ``lora.sync=merged`` the base has the adapter in it: merged on its way out, one tensor
        at a time, never in the training weights.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        self._settle()
        if part is WeightSet.ADAPTER:
            for name, tensor in self._adapter_export.full_weights(self._adapter_tensors()):
                yield file_name(name), tensor
        elif WeightSet.ADAPTER in self.weight_parts:
            yield from super().full_weights(part)
        else:
            yield from self._whole_model()

    def export_adapter(self, folder: Path) -> None:
        """Write a peft folder, atomically; see ``write_adapter_folder``."""
        write_adapter_folder(
            folder,
            self.full_weights(WeightSet.ADAPTER),
            adapter=self._adapter,
            base_model=self._folder,
            ranks=Ranks(self._device),
        )

    def compute_frozen_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows with the adapter switched off: the model as it was loaded."""
        with self._switched_off():
            return self.compute_logprobs(rows, temperature=temperature)

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        for adapter in self._adapted.values():
            adapter.is_active = False
        try:
            yield
        finally:
            for adapter in self._adapted.values():
                adapter.is_active = True

    def _adapt(self, stage: PolicyStage) -> None:
        """Freeze a stage and put adapters, still without values, into it."""
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
            adapter = adapt_layer(layer, rows, config=self._lora, is_expert=is_expert)
            if adapter is not None:
                self._adapted[weight_name] = adapter

    @torch.no_grad()
    def _fill(self, files: WeightFiles) -> None:
        super()._fill(files)
        values = self._adapter.initial_values()
        for name, tensor in self._adapter_tensors().items():
            blocks = blocks_of(
                name,
                tensor.shape,
                architecture=self._architecture,
                parallel=self._parallel.rank,
            )
            shape = torch.Size(blocks[0].place.global_shape)  # all are of one matrix
            whole = values.read(blocks[0].name, shape=shape, dtype=tensor.dtype)
            whole_box = tuple((0, size) for size in shape)
            for block in blocks:
                tensor[block.begin : block.end].copy_(whole[index_in(whole_box, block.box)])

    def _check_all_adapted(self) -> None:
        wanted = adapter_tensors(self._architecture, self._lora.modules, self._lora.rank)
        lacking = wanted.keys() - {spec.name for spec in self._adapter_export.specs}
        if lacking:
            raise ModelError(
                f"megatron-core's layers give no place to {len(lacking)} matrices of the adapter, "
                f"first: {min(lacking)}; take out what replaces its layers, such as an entry of "
                "megatron.transformer_args, or train with actor=fsdp2"
            )

    def _learning_specs(self) -> tuple[WeightSpec, ...]:
        return self._adapter_export.specs

    def _whole_model(self) -> NamedTensors:
        self._require("full_weights()", TrainState.PARAMETERS)
        self._settle()
        merged = _MergedTensors(self._model_tensors(), self._adapted, self._adapter.merge)
        yield from self._export.full_weights(merged)

    def _model_tensors(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_tensors() if not _is_of_adapter(name)}

    def _adapter_tensors(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_tensors() if _is_of_adapter(name)}


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


def _is_of_adapter(name: str) -> bool:
    return ".lora." in name


def _linear_layers(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of all linear layers by the files' names."""
    shapes = hf_tensors(architecture).items()
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes
        if len(shape) == 2
    }
