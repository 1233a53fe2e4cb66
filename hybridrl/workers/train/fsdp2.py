"""The training engine on PyTorch's FSDP2: gloo on CPUs, NCCL on GPUs, or one process alone.

Legend: B rows of a batch, L tokens of a row, T packed tokens, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.algorithms.aggregate import token_weights
from hybridrl.batch import SupervisedBatch, TrainBatch, jagged_from, row_lengths
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import ModelConfig
from hybridrl.errors import ModelError, RunFolderError
from hybridrl.metrics import Max, Metrics, Sum, merge
from hybridrl.workers.train.export import write_hf_folder
from hybridrl.workers.train.losses import SupervisedLoss
from hybridrl.workers.train.optimizer import GuardedAdamW
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.protocol import (
    TokenLoss,
    TokenLossInputs,
    TrainState,
    WeightPart,
    WeightSpec,
)
from hybridrl.workers.train.scorer import FSDP2Scorer
from hybridrl.workers.train.shards import Adapt, as_fsdp, full_tensor

NamedTensors = Iterator[tuple[str, Tensor]]


class FSDP2Engine(FSDP2Scorer):
    """The policy with its optimizer; a ``TrainEngine``.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size, optimizer.
        model_config: storage type and attention kernel.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        device: where the model computes.
        adapt: changes the model before it is loaded; what it freezes does not learn.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: ``model.attention`` does not run on the device in the compute type.
    """

    weight_parts: tuple[WeightPart, ...] = (WeightPart.BASE,)
    """Passes of a weight sync; see ``TrainEngine.weight_parts``."""

    _is_trainable = True

    optimizer: GuardedAdamW
    """Moments, and the number of steps taken."""

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        model_config: ModelConfig,
        num_total_steps: int,
        device: torch.device,
        adapt: Adapt | None = None,
    ) -> None:
        super().__init__(
            model_folder, config=config, model_config=model_config, device=device, adapt=adapt
        )
        self._policy.train()
        if config.gradient_checkpointing:
            self._policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = GuardedAdamW(
            (p for p in self._policy.parameters() if p.requires_grad),
            config=config.optimizer,
            num_total_steps=num_total_steps,
            ranks=self._ranks,
        )

    def update(
        self,
        batch: TrainBatch,
        *,
        loss: TokenLoss,
        aggregation: str,
        temperature: float,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows; see ``TrainEngine.update``.

        Each token's loss is weighed by its share of the *global* loss before it is summed over
        tokens, micro-batches and ranks, so the result does not depend on how rows fall on them.
        """
        self._require("update()", *TrainState)
        self.optimizer.drop_gradients()  # of an update that a loss broke off
        packer = self._packer(batch.token_ids_BL, batch.response_mask_BL)
        num_tokens, num_rows = self._count_globally(packer.response_lengths_B)
        weights_B = token_weights(
            packer.response_lengths_B,
            aggregation=aggregation,
            num_tokens_global=num_tokens,
            num_sequences_global=num_rows,
            max_response_tokens=max_response_tokens,
        )
        total_loss = torch.zeros((), device=self._device)
        parts: list[Metrics] = []
        plan = self._in_step(packer.plan(self._config.max_tokens_per_microbatch))
        for number, rows in enumerate(plan, 1):
            pack = packer.pack(rows)
            self._reduce_gradients(now=number == len(plan))
            scored = self._policy(
                pack.tokens, temperature, needs_entropy_gradient=loss.needs_entropy_gradient
            )
            if rows:
                pack_loss, metrics = loss(self._loss_inputs(batch, pack, weights_B, *scored))
                parts.append(metrics | _count_pack(pack))
            else:
                pack_loss = scored[0].sum()  # of nothing: 0, with a backward pass like the others'
            torch.autograd.backward(pack_loss)
            total_loss += pack_loss.detach()
        return merge([*parts, self._finish_step(total_loss)])

    def fit(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""
        nothing_BL = jagged_from(
            torch.zeros(batch.token_ids_BL.values().shape), row_lengths(batch.token_ids_BL)
        )
        rows = TrainBatch(
            token_ids_BL=batch.token_ids_BL,
            response_mask_BL=batch.response_mask_BL,
            advantages_BL=nothing_BL,
            sampler_logprobs_BL=nothing_BL,
            batch_size=batch.batch_size,
        )
        return self.update(
            rows,
            loss=SupervisedLoss(),
            aggregation="token_mean",
            temperature=1.0,
            max_response_tokens=1,
        )

    def weight_specs(self, part: WeightPart = WeightPart.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        return tuple(
            WeightSpec(name, tuple(p.shape), p.numel() * p.element_size())
            for name, p in self._policy.hf.named_parameters()
        )

    def full_weights(self, part: WeightPart = WeightPart.BASE) -> NamedTensors:
        """Yield each weight whole, under its HF name, one at a time. Every rank must exhaust it.

        Tied weights come once, in the storage type. Without shards a tensor is the live weight.
        """
        self._require("full_weights()", TrainState.PARAMETERS)
        for name, parameter in self._policy.hf.named_parameters():
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
                model=self._policy.hf,
                source=self._folder,
            )

        self._write(self._whole_policy(), write)

    def export_adapter(self, folder: Path) -> None:
        """Refuse: the whole policy learned, so there is no adapter.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"cannot write {folder}: this policy has no adapter; export the whole of it, or train "
            "with lora.enabled=true"
        )

    def _whole_policy(self) -> NamedTensors:
        """Yield what a model without adapters needs to be this policy."""
        return self.full_weights()

    def _write(self, weights: NamedTensors, write: Callable[[NamedTensors], None]) -> None:
        """Let rank 0 write what all ranks gather; all return, or raise, when it is done."""
        failure: RunFolderError | None = None
        if self.dp_rank == 0:
            try:
                write(weights)
            except RunFolderError as err:
                failure = err
        for _ in weights:  # the other ranks' part; and rank 0's, where it failed half-way
            pass
        message = self._ranks.share_text(str(failure) if failure else "")
        if message:
            raise RunFolderError(message) from failure

    def _tensors(self, part: TrainState) -> list[Tensor]:
        if part is TrainState.GRADIENTS:
            return self.optimizer.gradients()
        if part is TrainState.OPTIMIZER:
            return self.optimizer.state()
        return super()._tensors(part)

    def _count_globally(self, response_lengths_B: Tensor) -> tuple[int, int]:
        mine = [int(response_lengths_B.sum()), len(response_lengths_B)]
        num_tokens, num_rows = self._ranks.gather(mine).sum(dim=0).tolist()
        return num_tokens, num_rows

    def _loss_inputs(
        self, batch: TrainBatch, pack: Pack, weights_B: Tensor, *scored_S: Tensor
    ) -> TokenLossInputs:
        """Lay the batch's columns beside the current log-probs and entropies, both [S]."""
        current_S, entropy_S = scored_S

        def at_scored(column_BL: Tensor) -> Tensor:
            return column_BL.values()[pack.place_S].to(self._device)

        old_BL, reference_BL = batch.old_logprobs_BL, batch.reference_logprobs_BL
        return TokenLossInputs(
            current_logprobs_T=current_S,
            entropy_T=entropy_S,
            weights_T=weights_B[pack.row_S].to(self._device),
            advantages_T=at_scored(batch.advantages_BL),
            sampler_logprobs_T=at_scored(batch.sampler_logprobs_BL),
            old_logprobs_T=current_S.detach() if old_BL is None else at_scored(old_BL),
            reference_logprobs_T=None if reference_BL is None else at_scored(reference_BL),
        )

    def _reduce_gradients(self, *, now: bool) -> None:
        """Let ranks exchange gradients in the last backward pass of a step alone."""
        fsdp = as_fsdp(self._policy)
        if fsdp is not None:
            fsdp.set_requires_gradient_sync(now)

    def _finish_step(self, total_loss: Tensor) -> Metrics:
        """Step; what is the same on all ranks is summed up by rank 0 alone."""
        result = self.optimizer.step(total_loss)
        metrics: Metrics = {"policy/lr": Max(result.lr)}
        if not result.is_skipped:
            metrics["policy/grad_norm"] = Max(result.grad_norm)
        if self.dp_rank == 0:
            metrics["policy/updates"] = Sum(int(not result.is_skipped))
            metrics["policy/skipped_updates"] = Sum(int(result.is_skipped))
        return metrics


def _count_pack(pack: Pack) -> Metrics:
    return {
        "data/train_tokens": Sum(len(pack.tokens.token_ids_T)),
        "data/loss_tokens": Sum(len(pack.place_S)),
        "data/microbatches": Sum(1),
    }
