"""Packed tokens of a few responses for policy losses, and calls by the names of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.functions import parts

LOSSES: dict[str, Callable[..., Any]] = {
    name: vars(import_module(f"hybridrl.algorithms.{module}"))[name]
    for name, module in parts.POLICY_LOSS.built_in.items()
}


@dataclass(frozen=True)
class Packed:
    """Columns of packed tokens, by the names that parts ask for."""

    columns: dict[str, Tensor]
    rows: TokenRows

    def at(self, index_U: Tensor, rows: TokenRows | None = None) -> Packed:
        """Take some tokens; without rows they are all that there are."""
        if rows is None:
            rows = TokenRows.on_one_rank(self.rows.row_T[index_U], len(self.rows.lengths_R))
        return Packed({name: column[index_U] for name, column in self.columns.items()}, rows)

    def call(self, part: Callable[..., Any], **numbers: Any) -> Any:
        """Call a part with the inputs that it names."""
        inputs = {**self.columns, "rows": self.rows}
        named = inspect.signature(part).parameters
        return part(**{name: inputs[name] for name in named if name in inputs}, **numbers)

    def losses(self, part: Callable[..., Any], **numbers: Any) -> Tensor:
        """Return the loss of each token."""
        result = self.call(part, **numbers)
        losses_T = result.losses_T if isinstance(result, PolicyLoss) else result
        assert isinstance(losses_T, Tensor)
        return losses_T

    def slopes(self, part: Callable[..., Any], **numbers: Any) -> Tensor:
        """Return the gradient of the sum of losses by the log-prob of each token."""
        current_T = self.columns["current_logprobs_T"]
        (grad_T,) = torch.autograd.grad(self.losses(part, **numbers).sum(), current_T)
        return grad_T


def make_packed(
    lengths: tuple[int, ...] = (5, 1, 0, 7, 3), *, seed: int = 0, spread: float = 0.5
) -> Packed:
    """Make responses with one advantage each; ``spread`` nats between current and old policy."""
    source = torch.Generator().manual_seed(seed)
    row_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    num_tokens = len(row_T)
    old_T = -3 * torch.rand(num_tokens, generator=source) - 0.05
    moved_T = spread * torch.randn(num_tokens, generator=source)
    columns = {
        "current_logprobs_T": (old_T + moved_T).clamp(max=-0.01).requires_grad_(),
        "old_logprobs_T": old_T,
        "sampler_logprobs_T": old_T + 0.1 * torch.randn(num_tokens, generator=source),
        "advantages_T": torch.randn(len(lengths), generator=source)[row_T],
        "entropy_T": torch.rand(num_tokens, generator=source),
    }
    return Packed(columns, TokenRows.on_one_rank(row_T, len(lengths)))


def shared_rows(rows: TokenRows, own_U: Tensor) -> TokenRows:
    """Keep some tokens on this rank; the other ranks of the world have the others."""
    from hybridrl.workers.train.megatron.megatron_core import gather_from_sequence_parallel_region

    gather = partial(gather_from_sequence_parallel_region, group=dist.group.WORLD)
    return replace(rows, row_T=rows.row_T[own_U], gather=gather)
