"""The turns of conversations: runs of response tokens with other tokens between them.

Legend: B rows, S response tokens of all rows, K turns of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.response_tokens import Doubles, Floats, Integers, ResponseTokens


@dataclass(frozen=True, slots=True)
class Turns:
    """Where turns begin and end among the response tokens; a row without any has no turn."""

    begins_K: Integers
    """Index of the first token of each turn, in S."""

    lengths_K: Integers
    """Tokens of each turn, at least 1."""

    counts_B: Integers
    """Turns of each row."""

    @classmethod
    def of(cls, tokens: ResponseTokens) -> Turns:
        """Find the turns: one ends before a token that is no response token, and with its row."""
        is_begin_S = np.diff(np.flatnonzero(tokens.mask_T), prepend=-2) > 1
        row_begins_B = (tokens.lengths_B.cumsum() - tokens.lengths_B)[tokens.lengths_B > 0]
        is_begin_S[row_begins_B] = True
        begins_K = np.flatnonzero(is_begin_S)
        rows_S = np.repeat(np.arange(len(tokens.lengths_B)), tokens.lengths_B)
        return cls(
            begins_K=begins_K,
            lengths_K=np.diff(begins_K, append=len(is_begin_S)),
            counts_B=np.bincount(rows_S[begins_K], minlength=len(tokens.lengths_B)),
        )

    @property
    def last_K(self) -> Integers:
        """Index of the last token of each turn, in S."""
        return self.begins_K + self.lengths_K - 1

    def sum(self, values_S: Floats) -> Floats:
        """Return the sum over the tokens of each turn, float32 [K]."""
        sums_K: Floats = np.add.reduceat(values_S, self.begins_K, dtype=np.float64).astype(
            np.float32
        )
        return sums_K

    def spread(self, values_K: Floats | Doubles) -> Floats:
        """Give each token the value of its turn, float32 [S]."""
        spread_S: Floats = np.repeat(values_K.astype(np.float32), self.lengths_K)
        return spread_S

    def index_in_row(self) -> Tensor:
        """Count the turns of its row before each turn, int64 [K]."""
        begins_B = self.counts_B.cumsum() - self.counts_B
        return torch.from_numpy(np.arange(len(self.begins_K)) - np.repeat(begins_B, self.counts_B))
