"""Solve rates of rows so far, and an order that draws those which may go either way.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridrl.data.sampler import RowSampler

_KEPT = 0.5
"""Share of earlier responses that still count after new ones: the policy has changed since."""

SolveRate = tuple[int, float, float]
"""Number of a row; responses to it, earlier ones discounted; those of them that solved it."""


class SolveRates:
    """Solved responses to each of N rows."""

    def __init__(self, num_rows: int) -> None:
        self.counts_N2 = np.zeros((num_rows, 2))
        """Float64, responses and solved ones. Samplers hold views of it: written in place."""

    def note(self, row: int, *, num_responses: float, num_solved: float) -> None:
        """Count responses to a row; a reward between 0 and 1 is that part of a solved one."""
        self.counts_N2[row] = _KEPT * self.counts_N2[row] + (num_responses, num_solved)

    def state(self) -> tuple[SolveRate, ...]:
        """Return the counts of rows that have responses."""
        rows = self.counts_N2[:, 0].nonzero()[0].tolist()
        return tuple((row, *self.counts_N2[row].tolist()) for row in rows)

    def restore(self, state: Sequence[SolveRate]) -> None:
        """Know what ``state`` says, and nothing else."""
        self.counts_N2[:] = 0
        for row, *counts in state:
            self.counts_N2[row] = counts


class SolveRateSampler(RowSampler):
    """Draws rows in the ratio of p (1 - p), p their solve rates so far; none twice in a draw.

    That is largest at p = 1/2, the variance of a response's success (sampling for learnability,
    Foster et al., arXiv:2502.12272). One solved and one failed response are added to each row's: so
    rows without any are as likely as those at 1/2, and no row is given up.

    What it draws follows from the seed, the number of draws and the rates: it has no epochs, and
    may draw a row twice before it has drawn all.
    """

    def __init__(
        self, counts_N2: NDArray[np.float64], *, seed: int, fingerprint: str, name: str
    ) -> None:
        """Begin with a view of ``SolveRates.counts_N2``; ``name`` is that of the source."""
        super().__init__(len(counts_N2), seed=seed, shuffle=False, fingerprint=fingerprint)
        self._counts_N2 = counts_N2
        self._name = name

    def draw(self, num_rows: int) -> list[int]:
        """Return the next row numbers, by the rates of now; some twice if there are fewer rows."""
        drawn: list[int] = []
        while len(drawn) < num_rows:
            tried_N, solved_N = self._counts_N2.T
            rate_N = (solved_N + 1) / (tried_N + 2)
            # The largest u^(1/w) are a draw in the ratio of w without replacement (Efraimidis and
            # Spirakis, 2006); here their logarithms.
            text = f"{self._seed} {self._name} {self.num_drawn}"
            uniform_N = np.random.default_rng(list(text.encode())).random(self.num_rows)
            order_N = np.argsort(-np.log(uniform_N) / (rate_N * (1 - rate_N)), kind="stable")
            chosen = order_N[: num_rows - len(drawn)].tolist()
            drawn += chosen
            self.num_drawn += len(chosen)
        return drawn

    def seek(self, num_drawn: int) -> None:
        """Go to the position after ``num_drawn`` rows; rates are restored by their owner."""
        self.num_drawn = num_drawn
