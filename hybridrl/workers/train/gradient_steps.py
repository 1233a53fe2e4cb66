"""One optimizer step over many micro-batches and ranks: the same for policy and critic.

Legend: B rows of a batch, S scored (response) tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.aggregate import token_weights
from hybridrl.config.actor import EngineConfig
from hybridrl.diagnostics import trace
from hybridrl.metrics import Last, Max, Metrics, Sum, merge
from hybridrl.models.packed_model import PackedModel
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.optimizer import GuardedAdamW, StepResult
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.packs import Packs
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.shards import as_fsdp

LossShare = Callable[[Pack, Tensor], tuple[Tensor, Metrics]]
"""From a pack and the weight of each scored token [S] to the pack's share of the global loss and
metrics. A filler, which scores nothing, gives a 0 that carries a gradient, and no metrics: its
backward pass keeps the rank in step with the others."""


def global_weights(
    response_lengths_B: Tensor, *, aggregation: str, max_response_tokens: int, ranks: Ranks
) -> Tensor:
    """Return the weight of each token of each row in the *global* loss [B]; one collective.

    Args:
        response_lengths_B: of this rank's rows.
        aggregation: how tokens weigh; see ``algorithms/aggregate.py``.
        max_response_tokens: the fixed length of one of the aggregations.
        ranks: the data-parallel ranks.
    """
    mine = [int(response_lengths_B.sum()), len(response_lengths_B)]
    num_tokens, num_rows = ranks.gather(mine).sum(dim=0).tolist()
    return token_weights(
        response_lengths_B,
        aggregation=aggregation,
        num_tokens_global=num_tokens,
        num_sequences_global=num_rows,
        max_response_tokens=max_response_tokens,
    )


def step_metrics(result: StepResult, *, area: str, counts: bool) -> Metrics:
    """Tell what an optimizer step did.

    Args:
        result: the same on all ranks.
        area: ``policy`` or ``critic``.
        counts: True on one rank alone, since counts of ranks are added.
    """
    metrics: Metrics = {f"{area}/lr": Last(result.lr)}
    if not result.is_skipped:
        metrics[f"{area}/grad_norm"] = Max(result.grad_norm)
    if counts:
        metrics[f"{area}/updates"] = Sum(int(not result.is_skipped))
        metrics[f"{area}/skipped_updates"] = Sum(int(result.is_skipped))
    return metrics


class GradientSteps:
    """Takes the optimizer steps of one model, each on the union of all ranks' rows.

    Each token's loss is weighed by its share of the *global* loss before it is summed over
    tokens, micro-batches and ranks, so the result does not depend on how rows fall on them.

    Args:
        model: built and sharded; is made ready to learn.
        config: activation checkpointing, exchange of gradients and optimizer.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        ranks: the data-parallel ranks.
        device: where the model computes.
        area: of its metrics, ``policy`` or ``critic``.
    """

    optimizer: GuardedAdamW
    """Moments, and the number of steps taken."""

    constants: Metrics
    """Reported with every step."""

    def __init__(
        self,
        model: PackedModel,
        *,
        config: EngineConfig,
        num_total_steps: int,
        ranks: Ranks,
        device: torch.device,
        area: str,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._area = area
        self._reduces_every = config.fsdp2.reduce_gradients == "every_microbatch"
        self.constants = {}
        model.train()
        if config.gradient_checkpointing:
            model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = GuardedAdamW(
            (parameter for parameter in model.parameters() if parameter.requires_grad),
            config=config.optimizer,
            num_total_steps=num_total_steps,
            ranks=ranks,
        )

    def take(
        self, packs: Packs, loss_share: LossShare, *, aggregation: str, max_response_tokens: int
    ) -> Metrics:
        """Take one step, or skip it if the loss or the gradient is not finite.

        Args:
            packs: of this rank's rows.
            loss_share: computes a pack forward.
            aggregation: how tokens weigh; see ``algorithms/aggregate.py``.
            max_response_tokens: the fixed length of one of the aggregations.
        """
        self.optimizer.drop_gradients()  # of an update that a loss broke off
        weights_B = global_weights(
            packs.response_lengths_B,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
            ranks=self._ranks,
        )
        total_loss = torch.zeros((), device=self._device)
        parts: list[Metrics] = []
        for number, pack in enumerate(trace.each("microbatch", packs), 1):
            self._reduce_gradients(now=self._reduces_every or number == len(packs))
            share, metrics = loss_share(pack, weights_B[pack.row_S].to(self._device))
            torch.autograd.backward(share)
            total_loss += share.detach()
            parts.append(metrics)
        return merge([*parts, self._finish(total_loss)])

    def tensors(self, part: TrainState) -> list[Tensor]:
        """Return this rank's gradients or moments; nothing else is kept here."""
        if part is TrainState.GRADIENTS:
            return self.optimizer.gradients()
        return self.optimizer.state() if part is TrainState.OPTIMIZER else []

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Name parameters that learn, and their moments; see ``LearningEngine``."""
        learning = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        moments = {
            f"optimizer.{key}.{name}": value
            for name, parameter in learning.items()
            for key, value in self.optimizer.moments(parameter).items()
        }
        return {f"model.{name}": parameter for name, parameter in learning.items()} | moments

    def _reduce_gradients(self, *, now: bool) -> None:
        """Let ranks exchange gradients in the next backward pass, or let each add up its own.

        What is not exchanged stays whole, on every rank: the gradients of all weights.
        """
        fsdp = as_fsdp(self._model)
        if fsdp is not None:
            fsdp.set_requires_gradient_sync(now)

    def _finish(self, total_loss: Tensor) -> Metrics:
        result = self.optimizer.step(total_loss)
        return self.constants | step_metrics(result, area=self._area, counts=self._ranks.rank == 0)


class Learner:
    """What an engine that takes gradient steps shows to whoever saves and loads it."""

    _steps: GradientSteps

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        return self._steps.optimizer.num_steps

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Name parameters that learn, and their moments; nothing of them may be offloaded."""
        return self._steps.checkpoint_tensors()

    def begin_restore(self, *, num_updates: int) -> None:
        """Go to ``num_updates``, with moments that are still to be filled."""
        self._steps.optimizer.begin_restore(num_steps=num_updates)

    def end_restore(self) -> None:
        """Do nothing: what was filled are the live tensors."""
