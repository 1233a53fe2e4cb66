"""AdamW behind a schedule, a global clip and a guard against steps that are not finite."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridrl.config.actor import OptimizerConfig
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.shards import local_shard, num_copies


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; the same on all ranks."""

    grad_norm: float  # global L2 norm before clipping; not finite on some skipped steps
    lr: float  # of the step, or of the one that was skipped
    is_skipped: bool  # the loss or the norm was not finite: the step changed nothing


def learning_rate(config: OptimizerConfig, *, step: int, num_total_steps: int) -> float:
    """Return the learning rate of a step.

    It rises linearly over the warm-up to the peak at ``step == num_warmup_steps``, then falls as
    the schedule says. It reaches the last ratio one step after the run's last step. So neither the
    first nor the last step has a rate of 0. ``step`` is the number of steps before this one; after
    the last the rate stays.
    """
    if step < config.num_warmup_steps:
        return config.lr * (step + 1) / (config.num_warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    num_falling_steps = max(num_total_steps - config.num_warmup_steps, 1)
    progress = min((step - config.num_warmup_steps) / num_falling_steps, 1.0)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


class GuardedOptimizer(ABC):
    """Takes a step of AdamW (arXiv:1711.05101), or skips it and changes nothing."""

    num_steps: int = 0  # skipped ones not counted: the state of the schedule

    def __init__(self, config: OptimizerConfig, *, num_total_steps: int) -> None:
        self._config = config
        self._num_total_steps = num_total_steps

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        """Clip and apply the gradients, unless they or the loss are not finite; then drop them.

        ``loss`` is this rank's share, a scalar; all shares are summed.
        """
        total_loss, grad_norm = self._sum_over_ranks(loss)
        lr = learning_rate(self._config, step=self.num_steps, num_total_steps=self._num_total_steps)
        is_skipped = not (math.isfinite(total_loss) and math.isfinite(grad_norm))
        if not is_skipped:
            grads = self.gradients()
            if grads and grad_norm > self._config.max_grad_norm:
                torch._foreach_mul_(grads, self._config.max_grad_norm / grad_norm)
            self._apply(lr)
            self.num_steps += 1
        self.drop_gradients()
        return StepResult(grad_norm, lr, is_skipped)

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients that exist now."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Free all gradients."""

    @abstractmethod
    def begin_restore(self, *, num_steps: int) -> None:
        """Go to ``num_steps``, with moments of 0 for the caller to fill."""

    @abstractmethod
    def _sum_over_ranks(self, loss: Tensor) -> tuple[float, float]:
        """Return global loss and gradient norm, the same bits on all: so all step or skip."""

    @abstractmethod
    def _apply(self, lr: float) -> None:
        """Change the weights by the gradients."""


class GuardedAdamW(GuardedOptimizer):
    """PyTorch's AdamW on plain or sharded parameters; matrices decay, vectors do not."""

    adamw: torch.optim.AdamW  # has the moments by parameter

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        config: OptimizerConfig,
        num_total_steps: int,
        ranks: Ranks,
    ) -> None:
        super().__init__(config, num_total_steps=num_total_steps)
        self._parameters = list(parameters)
        self._ranks = ranks
        groups = [
            {
                "params": [p for p in self._parameters if p.ndim >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def drop_gradients(self) -> None:
        """See ``GuardedOptimizer``."""
        self.adamw.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """See ``GuardedOptimizer``."""
        return [local_shard(p.grad) for p in self._parameters if p.grad is not None]

    def state(self) -> list[Tensor]:
        """Return this rank's shards of the moments; empty before the first step."""
        return [
            local_shard(value)
            for moments in self.adamw.state.values()
            for value in moments.values()
            if isinstance(value, Tensor)
        ]

    def begin_restore(self, *, num_steps: int) -> None:
        """See ``GuardedOptimizer``."""
        self.num_steps = num_steps
        self.adamw.state.clear()
        if num_steps:
            for parameter in self._parameters:
                self.adamw.state[parameter] = {
                    "step": torch.zeros((), device=local_shard(parameter).device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def _sum_over_ranks(self, loss: Tensor) -> tuple[float, float]:
        square = loss.new_zeros((), dtype=torch.float64)
        if grads := self.gradients():
            norms = torch.stack(torch._foreach_norm(grads)).double()
            # Each replica adds the same squares.
            square = norms.square().sum().to(loss.device) / num_copies(self._parameters[0])
        total_loss, total_square = self._ranks.sum(torch.stack([loss.double(), square])).tolist()
        return total_loss, math.sqrt(total_square) if total_square >= 0 else math.nan

    def _apply(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
