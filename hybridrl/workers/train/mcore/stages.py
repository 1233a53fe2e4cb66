"""A model on megatron-core, cut as the ``megatron`` section says, that computes packed rows.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from hybridrl.batch import jagged_from, row_lengths
from hybridrl.config.actor import EngineConfig
from hybridrl.diagnostics import activity
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import Configuration, write_hf_folder
from hybridrl.workers.train.mcore.architecture import Architecture, read_architecture
from hybridrl.workers.train.mcore.export import WeightExport
from hybridrl.workers.train.mcore.layers import mark_shards
from hybridrl.workers.train.mcore.load import load_weights
from hybridrl.workers.train.mcore.megatron_core import TransformerConfig
from hybridrl.workers.train.mcore.model import PackedStage
from hybridrl.workers.train.mcore.parallel import Parallel, start_parallel
from hybridrl.workers.train.mcore.schedule import Forward, Schedule
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.mcore.transformer import (
    Duty,
    choose_kernels,
    tell_once,
    token_multiple,
    transformer_config,
)
from hybridrl.workers.train.packs import Packing
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.residence import ResidentModel, write_on_first
from hybridrl.workers.train.sharded import choose_kernel

BuildStage = Callable[[TransformerConfig, Architecture, Parallel, int | None], PackedStage]
"""Makes one (virtual) stage of this rank."""


class StagedModel(ResidentModel):
    """What policy, reference and critic on megatron-core have in common.

    Args:
        folder: the Hugging Face folder that the model comes from.
        build: makes a stage, without values.
        config: types and token budget.
        setting: parallel sizes and device.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type, or
            megatron-core refuses ``megatron.transformer_args``.
    """

    duty: Duty = "scores"
    """What of it learns."""

    dp_rank: int
    """This rank's place among those with other rows."""

    dp_size: int
    """Number of them."""

    leads: bool
    """Whether this rank answers for those with the same rows."""

    def __init__(
        self, folder: Path, build: BuildStage, *, config: EngineConfig, setting: MegatronContext
    ) -> None:
        super().__init__(setting.device)
        megatron = setting.megatron
        self._folder = folder
        self._parallel = start_parallel(
            megatron, device=setting.device, seed=setting.seed, timeout_s=setting.timeout_s
        )
        self._architecture = read_architecture(folder)
        kernels = choose_kernels(
            self._architecture,
            megatron=megatron,
            model=setting.model,
            engine=config,
            device=setting.device,
            duty=self.duty,
        )
        self._transformer = transformer_config(
            self._architecture,
            megatron=megatron,
            engine=config,
            device=setting.device,
            kernels=kernels,
        )
        if dist.get_rank() == 0:
            tell_once(megatron, setting.device)
        self._data_ranks = self._parallel.ranks_with_other_rows()
        self.dp_rank, self.dp_size = self._data_ranks.rank, self._data_ranks.size
        self.leads = self._parallel.leads
        num_virtual = megatron.num_virtual_stages
        self._packing = Packing(
            kernel="varlen"
            if kernels.has_attention
            else choose_kernel(setting.model.attention, config.compute_dtype, setting.device),
            max_tokens=config.max_tokens_per_microbatch,
            ranks=self._data_ranks,
            device=setting.device,
            multiple=token_multiple(self._transformer),
            share=self._parallel.token_share,
            group_size=megatron.pipeline_parallel_size if num_virtual > 1 else 1,
        )
        self._models = [
            build(self._transformer, self._architecture, self._parallel, number).to(setting.device)
            for number in (range(num_virtual) if num_virtual > 1 else [None])
        ]
        for model in self._models:
            mark_shards(model)
        stages = self._wrap(self._models, config)
        self._fill(WeightFiles(folder))
        self._export = self._plan_export(self._model_tensors())
        self._schedule = Schedule(stages, max_tokens=config.max_tokens_per_microbatch)

    def compute_rows(
        self,
        token_ids_BL: Tensor,
        response_mask_BL: Tensor,
        forward: Forward,
        *,
        num_columns: int,
        routed_experts_BLJK: Tensor | None = None,
    ) -> list[Tensor]:
        """Compute this rank's rows forward, and tell all ranks that have the same ones.

        Args:
            token_ids_BL: int64, jagged.
            response_mask_BL: bool, jagged.
            forward: gives columns [num_columns, S] of a pack, or [S] if there is one.
            num_columns: numbers per scored token.
            routed_experts_BLJK: the experts to go through; None leaves it to the model.

        Returns:
            Each column, jagged float32 [B, L] on the host, 0 where the mask is False.
        """
        self._settle()
        packs = self._packing.cut(
            token_ids_BL, response_mask_BL, routed_experts_BLJK=routed_experts_BLJK
        )
        found = self._schedule.score(
            packs, forward, lambda pack, output: (pack.place_S, output.float())
        )
        columns = torch.zeros(num_columns, *token_ids_BL.values().shape, device=self._device)
        for place_S, scores in found:
            columns[:, place_S.to(self._device)] = scores.view(num_columns, -1)
        if self._parallel.is_last_stage:
            self._parallel.ranks_with_other_tokens().sum(columns)
        pipeline = self._parallel.pipeline
        if pipeline.size > 1:
            with activity.scope("broadcast", waits=True):
                dist.broadcast(columns, group=pipeline.group, group_src=pipeline.size - 1)
        lengths_B = row_lengths(token_ids_BL)
        return [jagged_from(column, lengths_B) for column in columns.cpu()]

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        return self._export.specs

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight whole, under its HF name, one at a time. Every rank must exhaust it.

        Tied weights come once, in the type that the model computes in.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        self._settle()
        yield from self._export.full_weights(self._model_tensors())

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, configuration, tokenizer), atomically.

        Rank 0 writes; every rank returns, or raises, when it is done.

        Raises:
            RunFolderError: the folder exists already, or cannot be written.
        """

        def write(weights: NamedTensors) -> None:
            write_hf_folder(
                folder,
                weights,
                specs=self.weight_specs(),
                configs=self._configs(),
                source=self._folder,
            )

        write_on_first(Ranks(self._device), self._whole_model(), write)

    def _whole_model(self) -> NamedTensors:
        """Yield what a model without adapters needs to be this one."""
        return self.full_weights()

    def _settle(self) -> None:
        """Have all weights here; a collective call where they are gathered in the background."""

    def _plan_export(self, local: Mapping[str, Tensor]) -> WeightExport:
        return WeightExport(
            local,
            architecture=self._architecture,
            parallel=self._parallel.rank,
            group=self._parallel.replica.group,
        )

    def _configs(self) -> list[Configuration]:
        """Return the configurations that an exported folder holds."""
        config = AutoConfig.from_pretrained(self._folder, local_files_only=True)
        config.dtype = self._transformer.params_dtype
        if not (self._folder / "generation_config.json").is_file():
            return [config]
        return [config, GenerationConfig.from_pretrained(self._folder, local_files_only=True)]

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under megatron-core's names with global layer numbers."""
        for model in self._models:
            offset = model.first_layer
            for name, parameter in model.named_parameters():
                yield global_name(name, offset), parameter

    def _model_tensors(self) -> dict[str, nn.Parameter]:
        """Return those of this rank's parameters that a Hugging Face folder holds."""
        return dict(self.named_tensors())

    def _wrap(self, models: list[PackedStage], _config: EngineConfig) -> list[nn.Module]:
        """Return what the schedule computes with; parameters may move into other memory."""
        for model in models:
            model.requires_grad_(requires_grad=False)
        return list(models)

    def _fill(self, files: WeightFiles) -> None:
        """Give the parameters their values."""
        load_weights(
            dict(self.named_tensors()),
            files,
            architecture=self._architecture,
            parallel=self._parallel.rank,
        )

    def _tensors(self, part: TrainState) -> list[Tensor]:
        if part is TrainState.PARAMETERS:
            return [parameter.detach() for _, parameter in self.named_tensors()]
        return []


def global_name(name: str, offset: int) -> str:
    """Return a parameter's name with the layer's number in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + offset)
    return ".".join(parts)
