"""Which tokens of a micro-batch belong to which response: sums and means of full responses.

Legend: T packed response tokens of this rank, R rows, W ranks that share the tokens of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of packed tokens, in any order.

    With context parallelism the tokens of a row lie on several ranks. Then every method but
    ``spread`` is a collective call, and every rank gets the same result.
    """

    row_T: Tensor
    """int64, the row of each token, on the device."""

    lengths_R: Tensor
    """int64, tokens of each row on all ranks; 0 for a row without tokens. On the device."""

    num_tokens: int
    """Tokens of all rows on all ranks."""

    gather: Callable[[Tensor], Tensor] | None = None
    """From [N, ...] of this rank to [W N, ...] of all; its gradient is summed over the ranks and
    scattered. None if this rank has all tokens."""

    @classmethod
    def on_one_rank(cls, row_T: Tensor, num_rows: int) -> TokenRows:
        """Count the tokens of each of R rows; this rank has all of them."""
        return cls(row_T, row_T.bincount(minlength=num_rows), len(row_T))

    def sum(self, values_T: Tensor) -> Tensor:
        """Add the values of each row, [R] in their type; 0 for a row without tokens."""
        sums_R = values_T.new_zeros(len(self.lengths_R)).index_add(0, self.row_T, values_T)
        return sums_R if self.gather is None else self.gather(sums_R[None]).sum(0)

    def mean(self, values_T: Tensor) -> Tensor:
        """Average the values of each row, float [R]; 0 for a row without tokens."""
        return self.sum(values_T) / self.lengths_R.clamp(min=1)

    def spread(self, values_R: Tensor) -> Tensor:
        """Give each token the value of its row, [T]."""
        return values_R.index_select(0, self.row_T)

    def max(self, values_T: Tensor) -> Tensor:
        """Return the largest value of each row, [R], without gradient; 0 without tokens."""
        maxima_R = values_T.new_zeros(len(self.lengths_R)).scatter_reduce(
            0, self.row_T, values_T.detach(), "amax", include_self=False
        )
        if self.gather is None:
            return maxima_R
        is_here_R = self.row_T.bincount(minlength=len(self.lengths_R)) > 0
        everywhere_R = self.gather(maxima_R.masked_fill(~is_here_R, -torch.inf)[None]).amax(0)
        return everywhere_R.masked_fill(self.lengths_R == 0, 0.0)

    def total(self, values_T: Tensor) -> Tensor:
        """Add the values of all rows, a scalar."""
        total = values_T.sum()
        return total if self.gather is None else self.gather(total[None]).sum()

    def largest(self, values_T: Tensor, k: int) -> Tensor:
        """Return the k largest values of all rows, largest first, [k], without gradient.

        Filled with the lowest number of the type if there are fewer than ``k`` values.
        """
        largest = values_T.detach().topk(min(k, len(values_T))).values
        lowest = torch.iinfo if not largest.is_floating_point() else torch.finfo
        largest = pad(largest, (0, k - len(largest)), value=lowest(largest.dtype).min)
        return largest if self.gather is None else self.gather(largest).topk(k).values
