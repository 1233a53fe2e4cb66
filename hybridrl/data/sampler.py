"""The order in which rows are drawn: a pure function of the seed and of how many were drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hybridrl.errors import DataError


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of a sampler; save it as JSON with ``dataclasses.asdict``."""

    num_drawn: int
    """Rows drawn since the run began."""

    fingerprint: str
    """Of the rows it was drawn from; see ``data/rows.py``."""


class RowSampler:
    """Draws every row once an epoch, in a new order each epoch, without end.

    A batch may reach over the end of an epoch: no row is lost or doubled within one. Where there
    are fewer rows than a batch asks for, it holds some twice.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, fingerprint: str) -> None:
        """Start at the first row of epoch 0.

        Args:
            num_rows: rows of the data set, >= 1.
            seed: of the run.
            shuffle: False draws the rows as they stand.
            fingerprint: of the rows; a state of other rows is rejected.

        Raises:
            DataError: no rows.
        """
        if num_rows < 1:
            raise DataError("there are no rows to draw from; see data.train_files, data.task")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._num_drawn = 0
        self._order = self._order_of(0)

    @property
    def num_drawn(self) -> int:
        """Rows drawn since the run began: the index of the next one in the run's stream."""
        return self._num_drawn

    @property
    def epoch(self) -> float:
        """Passes over the rows, with fraction."""
        return self._num_drawn / self._num_rows

    def draw(self, num_rows: int) -> list[int]:
        """Return the next row numbers, each in [0, num_rows of the data set)."""
        drawn = []
        for _ in range(num_rows):
            drawn.append(self._order[self._num_drawn % self._num_rows])
            self._num_drawn += 1
            if self._num_drawn % self._num_rows == 0:
                self._order = self._order_of(self._num_drawn // self._num_rows)
        return drawn

    def state(self) -> SamplerState:
        """Return where the stream stands."""
        return SamplerState(self._num_drawn, self._fingerprint)

    def restore(self, state: SamplerState) -> None:
        """Continue from ``state``.

        Raises:
            DataError: it belongs to other rows, so the position is not valid.
        """
        if state.fingerprint != self._fingerprint:
            raise DataError(
                f"the data has changed: saved over rows {state.fingerprint[:12]}, these are "
                f"{self._fingerprint[:12]}; bring the old data.train_files back, or start a new run"
            )
        self._num_drawn = state.num_drawn
        self._order = self._order_of(state.num_drawn // self._num_rows)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_rows))
        if self._shuffle:
            # Text seeds go through sha512: neighbouring epochs get unrelated orders.
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order
