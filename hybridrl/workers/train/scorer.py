"""A model on FSDP2 that scores tokens, and leaves the device when told to.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch, jagged_from, row_lengths
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import ModelConfig
from hybridrl.errors import ConfigError, PhaseError
from hybridrl.models.packed import AttentionKernel
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.offload import ParkedTensors, resident_bytes
from hybridrl.workers.train.packing import RowPacker
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.shards import DTYPES, Adapt, as_fsdp, build_policy, local_shard


class FSDP2Scorer:
    """A model that scores tokens and does not learn, as the reference policy; a ``ScoringEngine``.

    The process group, if there is more than one rank, is initialised before; its timeout bounds
    every collective here.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size.
        model_config: storage type and attention kernel.
        device: where the model computes.
        adapt: changes the model before it is loaded.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    dp_rank: int
    """This rank's place among the data-parallel ranks."""

    dp_size: int
    """Number of data-parallel ranks."""

    _is_trainable = False

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        device: torch.device,
        adapt: Adapt | None = None,
    ) -> None:
        self._kernel = _choose_kernel(model_config.attention, config.compute_dtype, device)
        self._device = device
        self._folder = model_folder
        self._config = config
        self._ranks = Ranks(device)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size
        self._policy = build_policy(
            model_folder,
            config=config,
            dtype=DTYPES[model_config.dtype],
            device=device,
            num_ranks=self._ranks.size,
            is_trainable=self._is_trainable,
            adapt=adapt,
        )
        self._parked: dict[TrainState, ParkedTensors] = {}

    @torch.no_grad()
    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows; see ``ScoringEngine.compute_logprobs``. Values lie on the host.

        Temperature divides the logits. Both columns are 0 where the mask is False.
        """
        self._require("compute_logprobs()", TrainState.PARAMETERS)
        packer = self._packer(rows.token_ids_BL, rows.response_mask_BL)
        logprobs = torch.zeros(rows.token_ids_BL.values().shape)
        entropies = torch.zeros_like(logprobs)
        for row_numbers in self._in_step(packer.plan(self._config.max_tokens_per_microbatch)):
            pack = packer.pack(row_numbers)
            logprobs_S, entropies_S = self._policy(pack.tokens, temperature)
            logprobs[pack.place_S] = logprobs_S.cpu()
            entropies[pack.place_S] = entropies_S.cpu()
        fsdp = as_fsdp(self._policy)
        if fsdp is not None:
            fsdp.reshard()  # FSDP2 keeps the root whole until a backward pass that never comes
        lengths_B = row_lengths(rows.token_ids_BL)
        return ScoreBatch(
            logprobs_BL=jagged_from(logprobs, lengths_B),
            entropy_BL=jagged_from(entropies, lengths_B),
            batch_size=[len(lengths_B)],
        )

    def offload(self, part: TrainState) -> None:
        """Move a part to host memory and free its device memory. Twice is a no-op."""
        if part not in self._parked:
            self._parked[part] = ParkedTensors(self._tensors(part))

    def restore(self, part: TrainState) -> None:
        """Bring a part back, bit by bit. Twice is a no-op."""
        if part in self._parked:
            self._parked.pop(part).restore()

    def resident_bytes(self, part: TrainState) -> int:
        """Return the bytes that this part holds on the device of this rank, measured."""
        return resident_bytes(self._tensors(part))

    def _tensors(self, part: TrainState) -> list[Tensor]:
        if part is TrainState.PARAMETERS:
            return [local_shard(parameter.detach()) for parameter in self._policy.parameters()]
        return []

    def _require(self, action: str, *parts: TrainState) -> None:
        away = [part.value for part in parts if part in self._parked]
        if away:
            raise PhaseError(
                f"{action} needs {' and '.join(away)} on {self._device}, which are offloaded; "
                "leave the rollout phase first, or call restore() for each of them"
            )

    def _packer(self, token_ids_BL: Tensor, response_mask_BL: Tensor) -> RowPacker:
        return RowPacker(token_ids_BL, response_mask_BL, kernel=self._kernel, device=self._device)

    def _in_step(self, plan: list[list[int]]) -> list[list[int]]:
        """Add fillers until all ranks have as many micro-batches, at least one."""
        longest = int(self._ranks.gather([len(plan)]).max())
        return plan + [[]] * (max(longest, 1) - len(plan))


def _choose_kernel(attention: str, compute_dtype: str, device: torch.device) -> AttentionKernel:
    has_varlen = device.type == "cuda" and compute_dtype == "bfloat16"
    if attention == "varlen" and not has_varlen:
        raise ConfigError(
            "model.attention",
            attention,
            rule=f"the varlen kernel runs on CUDA in bfloat16, not on {device} in {compute_dtype}",
            fix="set model.attention=auto",
        )
    return "varlen" if has_varlen and attention != "padded" else "padded"
