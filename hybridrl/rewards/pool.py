"""Scores rows by several processes. A failure costs its own row, whatever the scheduling."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from hybridrl.processes.channel import CallFailed
from hybridrl.processes.pool import CallHung, Pool
from hybridrl.rewards.child import Reward
from hybridrl.rewards.runner import FunctionFile, RewardInputs, RewardProcess

log = logging.getLogger(__name__)

_PIECES_PER_PROCESS = 4
_MAX_HANGS_IN_A_ROW, _MAX_HANGS = 3, 16  # for each process
_GIVEN_UP = "not tried after others hung"
_STOPPED = "not tried after another failed"

_Scored = tuple[dict[int, Reward], CallFailed | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows for one call of one function."""

    function: int
    rows: Sequence[int]


@dataclass(slots=True)
class Outcomes:
    """The results so far of one batch."""

    by_function: list[dict[int, Reward]]
    """Reward of each row, or why there is none."""

    failed_calls: list[tuple[Piece, str]] = field(default_factory=list)
    """Each call with several rows that failed without naming one, and the reason."""

    num_hangs: int = 0
    """Rows that did not end in time."""

    num_hangs_in_a_row: int = 0
    """Those since the last row that was scored."""

    is_any_failed: bool = False
    """Whether a row was found that fails alone."""

    def add(self, piece: Piece, rewards: dict[int, Reward]) -> list[int]:
        """Keep the rewards of a piece, by position in it, and return the rows without."""
        known = self.by_function[piece.function]
        known.update({piece.rows[at]: reward for at, reward in rewards.items()})
        self.is_any_failed |= any(isinstance(reward, str) for reward in rewards.values())
        if any(isinstance(reward, float) for reward in rewards.values()):
            self.num_hangs_in_a_row = 0
        return [row for row in piece.rows if row not in known]

    def fail(self, function: int, row: int, failure: CallFailed) -> None:
        """Note that a row fails alone."""
        self.by_function[function][row] = str(failure)
        self.is_any_failed = True
        if isinstance(failure, CallHung):
            self.num_hangs += 1
            self.num_hangs_in_a_row += 1


class RewardPool:
    """Holds processes that each have all functions loaded; close it."""

    def __init__(
        self, functions: Sequence[FunctionFile], *, num_processes: int, timeout_s: float
    ) -> None:
        """Start the processes, all at a time.

        Raises:
            RewardError: a function cannot be loaded.
        """
        self._num_processes = num_processes
        children = [RewardProcess(functions, timeout_s=timeout_s) for _ in range(num_processes)]
        self._pool = Pool(children, name="reward")
        with ExitStack() as on_error:
            on_error.callback(self.close)
            starts = self._pool.start()
            wait(starts)
            for start in starts:
                start.result()  # raises the error of the first one
            on_error.pop_all()
        self.kinds = children[0].kinds
        """How each function is called; see ``RewardFunction.kind``."""

    def score(
        self,
        inputs: Sequence[RewardInputs],
        *,
        stop_at_failure: bool,
        known: Sequence[Mapping[int, Reward]] = (),
    ) -> Outcomes:
        """Score B rows with every function.

        Rows of a failed call are tried again alone. The time is bounded: after three hangs in a row
        for each process, or sixteen in all, rows not yet tried are given up.

        Args:
            inputs: of each function B rows, those of the same prompt adjacent.
            stop_at_failure: do not try the others once a row was found that fails alone.
            known: results by function and row of earlier calls; those rows are not scored.

        Raises:
            RewardError: a function had to be loaded again, and that failed.
        """
        outcomes = Outcomes([dict(rewards) for rewards in known or [{}] * len(inputs)])
        failed = (isinstance(r, str) for rewards in outcomes.by_function for r in rewards.values())
        outcomes.is_any_failed = any(failed)
        waiting = deque(self._cut(inputs, outcomes))
        running: dict[Future[_Scored], Piece] = {}
        while waiting or running:
            while waiting and len(running) < self._num_processes:
                piece = waiting.popleft()
                rows = inputs[piece.function].take(piece.rows)
                call = partial(RewardProcess.score, inputs=rows, function=piece.function)
                running[self._pool.submit(call)] = piece
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                waiting.extend(self._take_in(running.pop(future), future.result(), outcomes))
            if reason := self._reason_to_end(outcomes, stop_at_failure=stop_at_failure):
                waiting.clear()
                for rewards in outcomes.by_function if not running else ():
                    for row in range(len(inputs[0])):
                        rewards.setdefault(row, reason)
        return outcomes

    def score_some(self, inputs: RewardInputs, function: int) -> _Scored:
        """Score rows in one process, whatever else the others do; return a failure with its row.

        Of a function of one row: a row that fails gets the reason, and those behind it nothing.
        """
        rewards, failure = self._pool.run(lambda process: process.score(inputs, function))
        if failure is not None and self.kinds[function] == "row":
            rewards[len(rewards)] = str(failure)
        return rewards, failure

    def close(self) -> None:
        """End all processes. Twice is a no-op."""
        self._pool.close()

    def _cut(self, inputs: Sequence[RewardInputs], outcomes: Outcomes) -> Iterator[Piece]:
        """Cut rows into pieces; those that see several rows see all of a prompt's."""
        for function, kind in enumerate(self.kinds):
            known = outcomes.by_function[function]
            rows = [row for row in range(len(inputs[function])) if row not in known]
            if kind == "row":
                num_pieces = self._num_processes * _PIECES_PER_PROCESS
                rows_per_piece = -(-len(rows) // num_pieces)
                begins = list(range(0, len(rows), rows_per_piece or 1))
            else:
                prompts = [inputs[function].prompts[row] for row in rows]
                begins = _begins_of_slices(prompts, self._num_processes)
            for begin, end in pairwise([*begins, len(rows)]):
                yield Piece(function, rows[begin:end])

    def _take_in(self, piece: Piece, scored: _Scored, outcomes: Outcomes) -> list[Piece]:
        """Keep what a call gave, and return the pieces to try again."""
        rewards, failure = scored
        remaining = outcomes.add(piece, rewards)
        if failure is None:
            return []
        if len(piece.rows) > 1:
            log.warning("reward function failed on %d rows: %s", len(piece.rows), failure)
        if len(piece.rows) == 1 or self.kinds[piece.function] == "row":
            # Rows are scored in order, so the first without a reward is at fault.
            outcomes.fail(piece.function, remaining[0], failure)
            return [Piece(piece.function, remaining[1:])] if remaining[1:] else []
        outcomes.failed_calls.append((piece, f"{len(piece.rows)} responses {failure}"))
        return [Piece(piece.function, [row]) for row in remaining]

    def _reason_to_end(self, outcomes: Outcomes, *, stop_at_failure: bool) -> str:
        hangs, in_a_row = outcomes.num_hangs, outcomes.num_hangs_in_a_row
        limits = (_MAX_HANGS * self._num_processes, _MAX_HANGS_IN_A_ROW * self._num_processes)
        if hangs >= limits[0] or in_a_row >= limits[1]:
            return _GIVEN_UP
        return _STOPPED if stop_at_failure and outcomes.is_any_failed else ""


def _begins_of_slices(prompts: Sequence[str], num_slices: int) -> list[int]:
    """Return the first rows of at most ``num_slices`` slices of similar size, at new prompts."""
    num_rows = len(prompts)
    begins: list[int] = []
    for number in range(num_slices):
        begin = number * num_rows // num_slices
        while 0 < begin < num_rows and prompts[begin] == prompts[begin - 1]:
            begin += 1
        if begin < num_rows and begin not in begins:
            begins.append(begin)
    return begins
