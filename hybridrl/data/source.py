"""The run's stream of prompts, from which the training loop takes those of the next step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridrl.batch import PromptBatch, jagged
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.row_tensor import encode_row
from hybridrl.data.rows import fingerprint
from hybridrl.data.sampler import RowOrder, RowSampler
from hybridrl.data.sampler_state import SamplerState


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The prompts of one step, twice: for the workers, and with their answers for the driver."""

    prompts: PromptBatch
    rows: tuple[TokenizedRow, ...]


class PromptSource:
    """Draws the prompts of each step; see ``data/sampler.py`` for the order."""

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        *,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        sampler: RowOrder | None = None,
        sends_rows: bool = False,
    ) -> None:
        """Start at the beginning of the stream.

        Args:
            rows: at least one; may be fewer than ``num_prompts``.
            num_prompts: P, prompts per step.
            seed: of the run; gives both the order and the seed of each prompt.
            shuffle: new order each epoch.
            sampler: of a mix or a curriculum; None draws as ``shuffle`` says.
            sends_rows: put rows into the batches, for agents.

        Raises:
            DataError: no rows.
        """
        self._rows = rows
        self._num_prompts = num_prompts
        self._seed = seed
        self._sends_rows = sends_rows
        self._sampler: RowOrder = sampler or RowSampler(
            len(rows),
            seed=seed,
            shuffle=shuffle,
            fingerprint=fingerprint(row.row for row in rows),
        )

    @property
    def epoch(self) -> float:
        """Passes over the rows, with fraction."""
        return self._sampler.epoch

    @property
    def num_drawn(self) -> int:
        """Prompts drawn since the run began."""
        return self._sampler.num_drawn

    def next(self) -> PromptStep:
        """Draw the prompts of the next step."""
        first_index = self._sampler.num_drawn
        rows = [self._rows[index] for index in self._sampler.draw(self._num_prompts)]
        return build_prompt_step(
            rows, first_index=first_index, seed=self._seed, sends_rows=self._sends_rows
        )

    def state(self) -> SamplerState:
        """Return where the stream stands."""
        return self._sampler.state()

    def restore(self, state: SamplerState) -> None:
        """Continue from ``state``.

        Raises:
            DataError: it was taken over other rows.
        """
        self._sampler.restore(state)


def build_prompt_step(
    rows: Sequence[TokenizedRow],
    *,
    first_index: int,
    seed: int,
    stream: str = "train",
    sends_rows: bool = False,
) -> PromptStep:
    """Put rows into a batch.

    Args:
        rows: P >= 1 rows.
        first_index: of the first row in its stream; the others follow.
        seed: of the run.
        stream: keeps the random numbers of training and evaluation apart.
        sends_rows: put rows into the batch, for agents.
    """
    indices = range(first_index, first_index + len(rows))
    prompts = PromptBatch(
        token_ids_PL=jagged([row.token_ids for row in rows]),
        prompt_index_P=torch.tensor(indices),
        seed_P=torch.tensor([prompt_seed(seed, index, stream=stream) for index in indices]),
        row_PN=jagged([encode_row(row.row) for row in rows]) if sends_rows else None,
        batch_size=[len(rows)],
    )
    return PromptStep(prompts, tuple(rows))


def prompt_seed(run_seed: int, prompt_index: int, *, stream: str = "train") -> int:
    """Derive a prompt's seed, in [0, 2^63): the same in whatever batch it is sampled."""
    name = f"{stream} {run_seed} {prompt_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
