"""A model on FSDP2 that computes packed rows, and leaves the device when told to.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths
from hybridrl.config.actor import EngineConfig
from hybridrl.config.model import ModelConfig
from hybridrl.errors import ConfigError
from hybridrl.models.packed import AttentionKernel
from hybridrl.models.packed_model import PackedModel, PackedTokens
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import configs_of, write_hf_folder
from hybridrl.workers.train.packs import Packing
from hybridrl.workers.train.protocol import NamedTensors, TrainState, WeightSet, WeightSpec
from hybridrl.workers.train.residence import ResidentModel, write_on_first
from hybridrl.workers.train.shards import full_tensor, local_shard, reshard

Model = TypeVar("Model", bound=PackedModel)


class ShardedModel(ResidentModel, Generic[Model]):
    """What policy, reference and critic have in common; subclasses say what is computed.

    The process group, if there is more than one rank, is initialised before; its timeout bounds
    every collective here.

    Args:
        folder: the Hugging Face folder that the model comes from.
        build: makes the model, sharded over the given number of ranks.
        config: types and token budget.
        model_config: attention kernel.
        device: where the model computes.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    model: Model
    """The weights of this rank: all of them, or shards (see ``as_fsdp``)."""

    dp_rank: int
    """This rank's place among the data-parallel ranks."""

    dp_size: int
    """Number of data-parallel ranks."""

    leads: bool = True
    """Every rank has rows of its own."""

    def __init__(
        self,
        folder: Path,
        build: Callable[[int], Model],
        *,
        config: EngineConfig,
        model_config: ModelConfig,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self._folder = folder
        self._stays_on_host = config.fsdp2.cpu_offload
        self._ranks = Ranks(device)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size
        self._packing = Packing(
            kernel=choose_kernel(model_config.attention, config.compute_dtype, device),
            max_tokens=config.max_tokens_per_microbatch,
            ranks=self._ranks,
            device=device,
        )
        self.model = build(self._ranks.size)

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        return tuple(
            WeightSpec(name, tuple(p.shape), p.numel() * p.element_size())
            for name, p in self.model.hf.named_parameters()
        )

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight whole, under its HF name, one at a time. Every rank must exhaust it.

        Tied weights come once, in the storage type. Without shards a tensor is the live weight.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        for name, parameter in self.model.hf.named_parameters():
            yield name, full_tensor(parameter)

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
                configs=configs_of(self.model.hf),
                source=self._folder,
            )

        write_on_first(self._ranks, self._whole_model(), write)

    def _whole_model(self) -> NamedTensors:
        """Yield what a model without adapters needs to be this one."""
        return self.full_weights()

    def _tensors(self, part: TrainState) -> list[Tensor]:
        # With cpu_offload all of it lies on the host between computations: nothing can leave.
        return [] if self._stays_on_host else self._state(part)

    def _state(self, part: TrainState) -> list[Tensor]:
        """Return this rank's tensors of a part, wherever they lie."""
        if part is TrainState.PARAMETERS:
            return [local_shard(parameter.detach()) for parameter in self.model.parameters()]
        return []

    @torch.no_grad()
    def _score_rows(
        self,
        token_ids_BL: Tensor,
        response_mask_BL: Tensor,
        score: Callable[[PackedTokens], tuple[Tensor, ...]],
    ) -> list[Tensor]:
        """Apply ``score``, which gives columns [S] of a pack, to this rank's rows.

        Returns:
            Each column, jagged float32 [B, L] on the host, 0 where the mask is False.
        """
        columns: list[Tensor] = []
        try:
            for pack in self._packing.cut(token_ids_BL, response_mask_BL):
                scores = score(pack.tokens)
                columns = columns or [torch.zeros(token_ids_BL.values().shape) for _ in scores]
                for column, scores_S in zip(columns, scores, strict=True):
                    column[pack.place_S] = scores_S.cpu()
        finally:  # a phase may follow an error: what is whole would not leave the device
            reshard(self.model)
        lengths_B = row_lengths(token_ids_BL)
        return [jagged_from(column, lengths_B) for column in columns]


def choose_kernel(attention: str, compute_dtype: str, device: torch.device) -> AttentionKernel:
    """Return the attention kernel that ``model.attention`` means on a device.

    Raises:
        ConfigError: it does not run there in the compute type.
    """
    has_varlen = device.type == "cuda" and compute_dtype == "bfloat16"
    if attention == "varlen" and not has_varlen:
        raise ConfigError(
            "model.attention",
            attention,
            rule=f"the varlen kernel runs on CUDA in bfloat16, not on {device} in {compute_dtype}",
            fix="set model.attention=auto",
        )
    return "varlen" if has_varlen and attention != "padded" else "padded"
