"""The order in which rows are drawn: a pure function of the seed and of how many were drawn.

An order by solve rates also depends on these. Legend: N rows.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.data import MOST_SOURCES
from hybridrl.data.rows import SamplerState
from hybridrl.errors import DataError

_KEPT = 0.5
"""Share of earlier responses that still count after new ones: the policy has changed since."""

SolveRate = tuple[int, float, float]
"""Number of a row; responses to it, earlier ones discounted; those of them that solved it."""


class RowSampler:
    """Draws every row once an epoch, in a new order each epoch, without end.

    A batch may reach over the end of an epoch: no row is lost or doubled within one. Where there
    are fewer rows than a batch asks for, it holds some twice.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        seed: int,
        shuffle: bool,
        fingerprint: str,
        difficulties: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> None:
        """Start at the first row of epoch 0.

        Args:
            fingerprint: of the rows; a state of other rows is rejected.
            difficulties: of the rows; each epoch draws them in rising order, equal ones shuffled
                if ``shuffle``. None is no order.
        """
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._difficulties = None if difficulties is None else np.asarray(difficulties)
        self.num_drawn = 0
        """Rows drawn since the run began: the index of the next one in the run's stream."""
        self._order = self._order_of(0)

    @property
    def epoch(self) -> float:
        """Passes over the rows, with fraction."""
        return self.num_drawn / self.num_rows

    def draw(self, num_rows: int) -> list[int]:
        """Return the next row numbers, each in [0, num_rows of the data set)."""
        drawn = []
        for _ in range(num_rows):
            drawn.append(self._order[self.num_drawn % self.num_rows])
            self.num_drawn += 1
            if self.num_drawn % self.num_rows == 0:
                self._order = self._order_of(self.num_drawn // self.num_rows)
        return drawn

    def state(self) -> SamplerState:
        """Return the position in the stream."""
        return SamplerState(self.num_drawn, self._fingerprint)

    def restore(self, state: SamplerState) -> None:
        """Continue from ``state``; raises DataError if it belongs to other rows."""
        _require_same_rows(state.fingerprint, self._fingerprint)
        self.seek(state.num_drawn)

    def seek(self, num_drawn: int) -> None:
        """Go to the position after ``num_drawn`` rows."""
        self.num_drawn = num_drawn
        self._order = self._order_of(num_drawn // self.num_rows)

    def _order_of(self, epoch: int) -> array[int]:
        order = array("q", range(self.num_rows))  # 8 bytes a row; a list takes 36
        if self._shuffle:
            # Text seeds go through sha512: neighbouring epochs get unrelated orders.
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        if self._difficulties is not None:
            numbers = np.frombuffer(order, np.int64)
            # Stable: equal ones stay shuffled.
            by_difficulty = np.argsort(self._difficulties[numbers], kind="stable")
            order = array("q", numbers[by_difficulty].tobytes())
        return order


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


class MixSampler:
    """Draws from several sets of rows, each with its share of the draws and its own epochs.

    In each block of ``MOST_SOURCES`` draws every source has the same number of draws, its share
    rounded (largest remainder), in a new order. So the position in each source follows from the
    number of draws alone.
    """

    def __init__(
        self, samplers: Mapping[str, RowSampler], weights: Sequence[float], *, seed: int
    ) -> None:
        """Start at the beginning; the rows of all sources stand end to end.

        Each of the ``weights`` is > 0, and at least a thousandth of their sum.
        """
        self._samplers = samplers
        self._seed = seed
        self._sizes = [sampler.num_rows for sampler in samplers.values()]
        self._counts = _shares(weights, MOST_SOURCES)
        self.num_drawn = 0
        self._block = self._order_of(0)

    @property
    def epoch(self) -> float:
        """Rows drawn over rows of all sources: small sources are drawn more often."""
        return self.num_drawn / sum(self._sizes)

    def draw(self, num_rows: int) -> list[int]:
        """Return the next row numbers, in the rows of all sources end to end."""
        begins = [sum(self._sizes[:index]) for index in range(len(self._sizes))]
        sources = []
        for _ in range(num_rows):
            sources.append(self._block[self.num_drawn % MOST_SOURCES])
            self.num_drawn += 1
            if self.num_drawn % MOST_SOURCES == 0:
                self._block = self._order_of(self.num_drawn // MOST_SOURCES)
        # At once for each source: an order by solve rates repeats no row within a draw.
        rows = [
            iter(sampler.draw(sources.count(source)))
            for source, sampler in enumerate(self._samplers.values())
        ]
        return [begins[source] + next(rows[source]) for source in sources]

    def state(self) -> SamplerState:
        """Return the position in the stream."""
        states = {name: sampler.state() for name, sampler in self._samplers.items()}
        parts = (f"{name}={state.fingerprint}" for name, state in states.items())
        return SamplerState(self.num_drawn, ",".join(parts))

    def restore(self, state: SamplerState) -> None:
        """Continue from ``state``; raises DataError if it belongs to other rows."""
        _require_same_rows(state.fingerprint, self.state().fingerprint)
        self.num_drawn = state.num_drawn
        num_blocks, num_in_block = divmod(state.num_drawn, MOST_SOURCES)
        self._block = self._order_of(num_blocks)
        drawn = self._block[:num_in_block]
        for index, sampler in enumerate(self._samplers.values()):
            sampler.seek(num_blocks * self._counts[index] + drawn.count(index))

    def _order_of(self, block: int) -> list[int]:
        order = [index for index, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed} mix {block}").shuffle(order)
        return order


RowOrder = RowSampler | MixSampler
"""Draws row numbers without end, from one set of rows or from a mix."""


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Return integers that sum to ``total`` in the ratio of the weights, each at least 1."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    while sum(counts) > total:  # where tiny shares were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def _require_same_rows(saved: str, current: str) -> None:
    if saved != current:
        raise DataError(
            f"the data has changed: {describe_change(saved, current)}; bring the old rows back, "
            "or start a new run"
        )


def describe_change(saved: str, current: str) -> str:
    """Say which sources differ between two fingerprints."""
    before, now = (_by_source(fingerprint) for fingerprint in (saved, current))
    names = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
    digests = [(before.get(name, "none")[:12], now.get(name, "none")[:12]) for name in names]
    return ", ".join(
        f"{name or 'rows'}: {saved} there, {current} here"
        for name, (saved, current) in zip(names, digests, strict=True)
    )


def _by_source(fingerprint: str) -> dict[str, str]:
    named = (part.rpartition("=") for part in fingerprint.split(","))
    return {name: digest for name, _, digest in named}
