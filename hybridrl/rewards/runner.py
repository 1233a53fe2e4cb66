"""Reward functions in processes that can be killed. A failure costs its own row, in any order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridrl.config.limits import ArgumentValue
from hybridrl.config.reward import BUILT_IN_REWARDS, RewardConfig, RewardPart
from hybridrl.errors import ConfigError, RewardError, SandboxError, suggest_name
from hybridrl.processes.child import Message
from hybridrl.processes.pool import (
    CallFailed,
    CallHung,
    CallKilled,
    Child,
    Garbage,
    LoadFailed,
    Pool,
)
from hybridrl.processes.sandbox import require_sandbox
from hybridrl.rewards.child import Reward

log = logging.getLogger(__name__)

_ANSWER_BYTES, _REWARD_BYTES = 1 << 16, 1 << 14
"""Largest size of an answer: a constant, and an amount per reward."""

_KINDS = {"batch", "row", "concurrent"}
_MAX_RESTARTS = 2
_CONCURRENT_GRACE_S = 1.0
"""Added where the process itself limits each row: it answers before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInputs:
    """Columns of B responses to be scored."""

    responses: list[str]
    answers: list[str]
    prompts: list[str]
    sources: list[str]
    lengths: list[int]  # tokens of the response
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    """Role and text of each message behind the prompt; empty if all responses are single turns."""
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """Further columns of the data, by the name that functions ask for."""

    def __len__(self) -> int:
        return len(self.responses)

    def columns(self) -> dict[str, list[Any]]:
        """Return all columns by name."""
        usual = (each.name for each in fields(self) if each.name != "own")
        return {name: getattr(self, name) for name in usual} | {**self.own}

    def take(self, rows: Sequence[int]) -> RewardInputs:
        """Return some rows, in the order of ``rows``."""
        taken = {
            name: [column[row] for row in rows] if column else []
            for name, column in self.columns().items()
        }
        own = {name: taken.pop(name) for name in self.own}
        return RewardInputs(**taken, own=own)


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionFile:
    """A reward function in a Python file, and its arguments."""

    path: Path
    name: str
    args: Mapping[str, ArgumentValue]

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


class RewardProcess(Child):
    """Runs users' functions in a process of its own, with a deadline for every call."""

    def __init__(self, functions: Sequence[FunctionFile], *, timeout_s: float) -> None:
        """Start nothing yet. Functions are called by their number.

        ``timeout_s`` are seconds for one call, from the first byte of its input on; of a function
        of one row for each row.
        """
        files = [
            {"path": str(each.path), "name": each.name, "args": dict(each.args)}
            for each in functions
        ]
        super().__init__(
            "hybridrl.rewards.child",
            {"functions": files, "timeout_s": timeout_s},
            names=[f"reward.function={each}" for each in functions],
            timeout_s=timeout_s,
        )

    @property
    def kinds(self) -> Sequence[str]:
        """How each function is called, see ``RewardFunction.kind``; known once it started."""
        return tuple(map(str, self.loaded)) if isinstance(self.loaded, list) else ()

    def start(self) -> None:
        """Start the process, unless it runs; RewardError if a function does not load in 60 s."""
        try:
            super().start()
        except LoadFailed as failure:
            raise RewardError(f"{failure}; correct the file") from failure
        if len(self.kinds) != len(self.names) or not _KINDS.issuperset(self.kinds):
            raise RewardError(f"{self.names[0]}: its process sent something else than its kind")

    def score(
        self, inputs: RewardInputs, function: int = 0
    ) -> tuple[dict[int, Reward], CallFailed | None]:
        """Return rewards by row, and why those of other rows are missing: the call failed or hung.

        A process that somebody killed, the kernel for want of memory for example, is started again
        and asked again, twice at most; all attempts share the ``timeout_s`` seconds.
        """
        rewards: dict[int, Reward] = {}
        remaining_s, num_restarts = self.timeout_s, 0
        while True:
            begin, num_before = time.monotonic(), len(rewards)
            try:
                self.start()
                self._score_once(inputs, function, rewards, remaining_s)
                return rewards, None
            except CallKilled as killed:
                if len(rewards) > num_before:
                    remaining_s, num_restarts = self.timeout_s, 0  # it died of another row
                remaining_s -= time.monotonic() - begin
                if num_restarts == _MAX_RESTARTS or remaining_s <= 0.0:
                    return rewards, killed
                num_restarts += 1
                log.warning(
                    "the process of %s %s during a call; it is started again (%d of %d)",
                    *(self.names[function], killed, num_restarts, _MAX_RESTARTS),
                )
            except CallFailed as failure:
                return rewards, failure

    def _score_once(
        self, inputs: RewardInputs, function: int, rewards: dict[int, Reward], timeout_s: float
    ) -> None:
        """Add the rewards of the rows that have none yet, as they come."""
        rows = [row for row in range(len(inputs)) if row not in rewards]
        with self.call(
            {"function": function, "columns": inputs.take(rows).columns()},
            max_bytes=_ANSWER_BYTES + len(rows) * _REWARD_BYTES,
            timeout_s=timeout_s,
            grace_s=_CONCURRENT_GRACE_S if self.kinds[function] == "concurrent" else 0.0,
        ) as next_answer:
            missing = set(range(len(rows)))
            while missing:
                first, values = _rewards_of(next_answer())
                places = range(first, first + len(values))
                if not places or not missing.issuperset(places):
                    raise Garbage("answered with rewards of rows that were not asked for")
                missing.difference_update(places)
                rewards.update(zip(rows[first:], values, strict=False))


def _rewards_of(answer: Message) -> tuple[int, list[Reward]]:
    row, rewards = answer.get("row", 0), answer.get("rewards", "none")
    is_list = isinstance(row, int) and isinstance(rewards, list)
    if not is_list or not all(type(value) in (float, str) for value in rewards):
        raise Garbage("answered with text that is not a list of rewards")
    return row, rewards


def find_function(part: RewardPart) -> FunctionFile:
    """Find the file of a function; RewardError if there is no such name or file."""
    spelled = part.function
    if spelled in BUILT_IN_REWARDS:
        path = Path(__file__).with_name(f"{BUILT_IN_REWARDS[spelled]}.py")
        return FunctionFile(path=path, name=spelled, args=part.args)
    file, colon, name = spelled.rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.function={spelled!r} is not built in; "
            f"{suggest_name(spelled, [*BUILT_IN_REWARDS])} "
            "For your own set reward.function=path/to/file.py:function"
        )
    if not Path(file).is_file():
        raise RewardError(
            f"reward.function={spelled!r}: {file} is not a file; paths are relative to {Path.cwd()}"
        )
    return FunctionFile(path=Path(file), name=name, args=part.args)


def check_sandbox(part: RewardPart) -> None:
    """Try the sandbox of a function that runs code; SandboxError if it cannot be enforced here."""
    if part.function == "code":
        require_sandbox(str(part.args.get("sandbox", "namespaces")))


def find_reward_flaws(reward: RewardConfig) -> list[ConfigError]:
    """Return an error for each function that a process cannot load, or not run in its sandbox."""
    flaws = []
    for name, part in reward.parts.items():
        path, colon, _ = part.function.rpartition(":")
        key = "reward.function" if reward.function else f"reward.functions.{name}.function"
        try:
            check_sandbox(part)
        except SandboxError as err:
            flaws.append(ConfigError(key, part.function, str(err), "choose another function"))
        if not colon:
            continue
        try:
            with closing(RewardProcess([find_function(part)], timeout_s=reward.timeout_s)) as child:
                child.start()
        except RewardError as err:
            reason = str(err).partition("cannot be loaded: ")[2] or str(err)
            rule = f"cannot be loaded: {reason.removesuffix('; correct the file')}"
            flaws.append(ConfigError(key, part.function, rule, f"correct {path}"))
    return flaws


_PIECES_PER_PROCESS = 4
_MAX_HANGS_IN_A_ROW, _MAX_HANGS = 3, 16  # for each process

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
        """Start the processes, all at a time; RewardError if a function cannot be loaded."""
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
        for each process, or sixteen in all, rows not yet tried are given up; with
        ``stop_at_failure`` once a row was found that fails alone.

        Args:
            inputs: of each function B rows, those of the same prompt adjacent.
            known: results by function and row of earlier calls; those rows are not scored.
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
            return "not tried after others hung"
        is_stopped = stop_at_failure and outcomes.is_any_failed
        return "not tried after another failed" if is_stopped else ""


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
