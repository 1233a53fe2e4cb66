"""The run's stream of prompts, from which the training loop takes those of the next step."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import NonTensorStack
from torch import Tensor

from hybridrl.batch import PromptBatch, jagged, objects
from hybridrl.data.images import begin_to_load
from hybridrl.data.prompts import TokenizedRow, encode_row
from hybridrl.data.rows import SamplerState
from hybridrl.data.sampler import RowOrder, SolveRates
from hybridrl.errors import PhaseError
from hybridrl.single_controller.payload import concat_rows


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The prompts of one step, twice: for the workers, and with their answers for the driver."""

    prompts: PromptBatch
    rows: tuple[TokenizedRow, ...]

    def at(self, positions: Sequence[int]) -> PromptStep:
        """Return the prompts at these positions, in this order."""
        chosen = list(positions)
        return PromptStep(self.prompts[chosen], tuple(self.rows[p] for p in chosen))

    @staticmethod
    def join(steps: Sequence[PromptStep]) -> PromptStep:
        """Put the prompts of several, at least one, into one."""
        if len(steps) == 1:
            return steps[0]
        return PromptStep(
            concat_rows([step.prompts for step in steps]),
            tuple(row for step in steps for row in step.rows),
        )


class PromptSource:
    """Draws the prompts of each step; see ``data/sampler.py`` for the order.

    Prompts that were open when a checkpoint was made are drawn first by the run that resumes.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        *,
        num_prompts: int,
        seed: int,
        sampler: RowOrder,
        sends_rows: bool = False,
        solve_rates: SolveRates | None = None,
        columns: Callable[[Sequence[TokenizedRow]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Start at the beginning of the stream.

        Args:
            rows: at least one; may be fewer than ``num_prompts``, P of a step.
            sends_rows: put rows into the batches, for agents.
            solve_rates: of the rows, which the sampler draws by; None: it draws by none.
            columns: further ones of the batch of some rows, by name; None: there are none.
        """
        self._rows = rows
        self._num_prompts = num_prompts
        self._seed = seed
        self._sends_rows = sends_rows
        self._columns = columns
        self.open = OpenPrompts()
        """Prompts that were drawn, and are open; none between the steps of a synchronous run."""
        self._returned: deque[tuple[int, TokenizedRow]] = deque()
        """Prompts that a checkpoint gave back, with their indices."""
        self._sampler = sampler
        self._solve_rates = solve_rates
        self._numbers: dict[int, int] = {}
        """Row numbers of drawn prompts, by their index, until they are scored."""

    @property
    def epoch(self) -> float:
        """Passes over the rows, with fraction."""
        return self._sampler.epoch

    @property
    def num_drawn(self) -> int:
        """Prompts drawn since the run began."""
        return self._sampler.num_drawn

    def next(self, num_prompts: int | None = None) -> PromptStep:
        """Draw prompts, at least one; None: as many as a step has."""
        wanted = num_prompts or self._num_prompts
        drawn = [self._returned.popleft() for _ in range(min(wanted, len(self._returned)))]
        drawn += self._draw(wanted - len(drawn))
        rows, indices = [row for _, row in drawn], [index for index, _ in drawn]
        step = build_prompt_step(rows, indices, seed=self._seed, sends_rows=self._sends_rows)
        for name, column in (self._columns(rows) if self._columns else {}).items():
            setattr(step.prompts, name, column)
        return step

    def state(self) -> SamplerState:
        """Return where the stream stands, and which of its prompts are open."""
        returned = [index for index, _ in self._returned]
        is_open = tuple(sorted([*self.open.indices, *returned]))
        rates = () if self._solve_rates is None else self._solve_rates.state()
        return replace(self._sampler.state(), open_prompts=is_open, solve_rates=rates)

    def note_rewards(
        self, prompt_index_B: Tensor, rewards_B: Tensor, *, is_left_out_B: Tensor | None = None
    ) -> None:
        """Count responses to drawn prompts, for an order by solve rates alone.

        Those that could not be scored (``is_left_out_B``) count for nothing.
        """
        if self._solve_rates is None:
            return
        if is_left_out_B is not None:
            prompt_index_B, rewards_B = prompt_index_B[~is_left_out_B], rewards_B[~is_left_out_B]
        for index in sorted(set(prompt_index_B.tolist())):
            rewards = rewards_B[prompt_index_B == index].double().clamp(0, 1)
            self._solve_rates.note(
                self._numbers[index], num_responses=len(rewards), num_solved=float(rewards.sum())
            )
        self._numbers.clear()

    def restore(self, state: SamplerState) -> None:
        """Continue from ``state``, its open prompts first; DataError if its rows were others."""
        self.open = OpenPrompts()
        first = min(state.open_prompts, default=state.num_drawn)
        self._sampler.restore(replace(state, num_drawn=first))
        if self._solve_rates is not None:
            self._solve_rates.restore(state.solve_rates)
        is_open = set(state.open_prompts)
        drawn = self._draw(state.num_drawn - first)
        self._returned = deque((index, row) for index, row in drawn if index in is_open)

    def _draw(self, num_rows: int) -> list[tuple[int, TokenizedRow]]:
        """Draw from the stream: index in it, and row."""
        first = self._sampler.num_drawn
        numbers = self._sampler.draw(num_rows)
        if self._solve_rates is not None:
            self._numbers.update(zip(range(first, first + num_rows), numbers, strict=True))
        return [(first + n, self._rows[number]) for n, number in enumerate(numbers)]


def build_prompt_step(
    rows: Sequence[TokenizedRow],
    indices: Sequence[int],
    *,
    seed: int,
    stream: str = "train",
    sends_rows: bool = False,
) -> PromptStep:
    """Put P >= 1 rows, with their indices in a stream, into a batch.

    ``stream`` keeps the random numbers of training and evaluation apart. With ``sends_rows`` the
    rows themselves are in the batch, for agents.
    """
    prompts = PromptBatch(
        token_ids_PL=jagged([row.token_ids for row in rows]),
        prompt_index_P=torch.tensor(list(indices)),
        seed_P=torch.tensor([prompt_seed(seed, index, stream=stream) for index in indices]),
        row_PN=jagged([encode_row(row.row) for row in rows]) if sends_rows else None,
        images_P=images_column(rows),
        batch_size=[len(rows)],
    )
    return PromptStep(prompts, tuple(rows))


def images_column(rows: Sequence[TokenizedRow]) -> NonTensorStack | None:
    """Begin to load the images of all rows; None: the model sees none."""
    if rows[0].images is None:
        return None
    return objects(begin_to_load([row.images or () for row in rows]))


def prompt_seed(run_seed: int, prompt_index: int, *, stream: str = "train") -> int:
    """Derive a prompt's seed, in [0, 2^63): the same in whatever batch it is sampled."""
    name = f"{stream} {run_seed} {prompt_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


class OpenPrompts:
    """Prompts, by their index in the stream, to which engines sample while the trainer learns.

    A checkpoint holds the indices, and the run that resumes draws the same rows again: so no prompt
    is lost or doubled.
    """

    def __init__(self) -> None:
        self._by_index: dict[int, PromptStep] = {}

    def __len__(self) -> int:
        return len(self._by_index)

    @property
    def indices(self) -> tuple[int, ...]:
        """In rising order."""
        return tuple(sorted(self._by_index))

    def add(self, task: PromptStep) -> None:
        """Note prompts that were drawn."""
        for position, index in enumerate(task.prompts.prompt_index_P.tolist()):
            self._by_index[index] = task.at([position])

    def of(self, indices: Sequence[int]) -> PromptStep:
        """Return open prompts, at least one, in this order; they stay open."""
        return PromptStep.join([self._by_index[index] for index in indices])

    def take(self, indices: Sequence[int]) -> PromptStep:
        """Return prompts whose responses are there, in this order; they are open no more.

        Raises PhaseError if one is not open: its responses came twice, or belong to another run.
        """
        unknown = [index for index in indices if index not in self._by_index]
        if unknown or len(set(indices)) < len(indices):
            raise PhaseError(
                f"the rollout engines gave responses to prompts {list(indices)}; of these "
                f"{unknown or 'some'} are not open, or come twice"
            )
        return PromptStep.join([self._by_index.pop(index) for index in indices])
