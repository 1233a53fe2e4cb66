"""Scores responses, and says which one a reward function failed on.

Legend: B responses, K reward functions.
"""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from hybridrl.config.reward import RewardConfig, RewardPart
from hybridrl.errors import RewardError, shown
from hybridrl.processes.child import Declined
from hybridrl.processes.guard import usual_num_processes
from hybridrl.processes.pool import CallHung
from hybridrl.rewards import functions
from hybridrl.rewards.child import Reward, RewardFunction
from hybridrl.rewards.functions import model
from hybridrl.rewards.judge_reader import JudgeAnswer, judge_arguments
from hybridrl.rewards.runner import RewardInputs, RewardPool, check_sandbox, find_function

log = logging.getLogger(__name__)

_IN_DRIVER = {
    function.__name__: function
    for function in (
        functions.exact_match,
        functions.sorted_prefix,
        functions.numeric,
        functions.length,
    )
}
"""Built-in functions that end quickly whatever the text, so that they need no process."""

_BY_ROW = ("http",)
"""Built-in functions that take several rows for speed, and score each by itself."""

LARGEST_REWARD = 1e15
"""Beyond it float32 loses more than units, and squares of rewards (their deviation, a critic's
loss) come near the 3e38 at which float32 ends."""


@dataclass(frozen=True, slots=True)
class EarlyRow:
    """Rewards of a row whose scoring began while others were sampled."""

    rewards: Sequence[Reward | None]
    """By function of the pool; None: it was not called, or the row has to be tried again."""

    is_in_time: bool
    """Whether it ended before the last response."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of B responses by K functions."""

    names: tuple[str, ...]
    """K names, as ``reward.functions`` has them."""

    reward_weights_K: Tensor
    """float32."""

    reward_parts_BK: Tensor
    """float32, at most LARGEST_REWARD in size with its weight; 0 where scoring failed."""

    is_failed_BK: Tensor
    """bool."""

    is_early_B: Tensor | None = None
    """bool, scored before the last response ended; None: no function can do that."""

    is_unreadable_B: Tensor | None = None
    """bool, a judge's answer had no score; None: there is no judge."""

    is_left_out_B: Tensor | None = None
    """bool, something broke that is not the policy: nothing is learned from the response, and it
    is in no group. None: nothing is left out."""

    def at(self, index_B: Tensor) -> Self:
        """Return the scores of these rows."""
        return replace(self, **{name: values[index_B] for name, values in self._by_row().items()})

    @staticmethod
    def join(rounds: Sequence[Scores]) -> Scores:
        """Return the scores of all rows, in order."""
        parts = [scores._by_row() for scores in rounds]
        joined: dict[str, Any] = {
            name: torch.cat([part[name] for part in parts if name in part])
            for name in ChainMap(*parts)
        }
        return replace(rounds[0], **joined)

    def _by_row(self) -> dict[str, Any]:
        """Return the tensors of B rows by field, without those that are None."""
        shared = ("names", "reward_weights_K")
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {k: v for k, v in values.items() if k not in shared and v is not None}

    @property
    def rewards_B(self) -> Tensor:
        """float32: the sum of weights times rewards."""
        return (self.reward_parts_BK.double() @ self.reward_weights_K.double()).float()

    @property
    def is_failed_B(self) -> Tensor:
        """Bool: a function could not score the response."""
        return self.is_failed_BK.any(dim=1)


class RewardScorer:
    """Holds the reward functions for the run; close it, or use it in a ``with``."""

    def __init__(self, config: RewardConfig) -> None:
        """Load the functions, so that a wrong path ends the run before it began.

        RewardError: one cannot be loaded. SandboxError: code cannot be run in the sandbox of one.
        """
        self._config = config
        self._parts = config.parts
        for part in self._parts.values():
            check_sandbox(part)
        self._in_driver = {
            name: RewardFunction(_IN_DRIVER[part.function], part.args, timeout_s=config.timeout_s)
            for name, part in self._parts.items()
            if part.function in _IN_DRIVER
        }
        self._models = config.model_paths
        self._judges = config.judges
        known = {*self._in_driver, *self._models, *self._judges, *config.agent_names}
        self._scored = [name for name in self._parts if name not in known]
        """Functions of a process that see the responses; behind them it has those of judges."""
        self.num_processes = config.num_processes or usual_num_processes()
        self._pool: RewardPool | None = None
        if names := [*self._scored, *self._judges]:
            self._pool = RewardPool(
                [find_function(self._parts[name]) for name in names],
                num_processes=self.num_processes,
                timeout_s=config.timeout_s,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def early_functions(self) -> list[int]:
        """The functions of the pool that may score a response before others have ended.

        The others see several rows, and may compare them.
        """
        kinds = () if self._pool is None else self._pool.kinds
        parts = (self._parts[name].function for name in self._scored)
        return [
            number
            for number, (kind, function) in enumerate(zip(kinds, parts, strict=False))
            if kind != "batch" or function in _BY_ROW
        ]

    def score_early(self, inputs: RewardInputs) -> tuple[list[list[Reward | None]], int]:
        """Score rows by ``early_functions`` in one process, and count the calls that hung.

        Of each row the rewards are by function of the pool, None where there is none yet.
        """
        rewards: list[list[Reward | None]] = [
            [None] * len(self._scored) for _ in range(len(inputs))
        ]
        num_hangs = 0
        if self._pool is None:
            return rewards, num_hangs
        for function in self.early_functions:
            known, failure = self._pool.score_some(inputs, function)
            num_hangs += isinstance(failure, CallHung)
            for row, reward in known.items():
                rewards[row][function] = reward
        return rewards, num_hangs

    def score(
        self,
        inputs: RewardInputs,
        *,
        model_scores: Mapping[str, Sequence[Reward]] | None = None,
        judge_answers: Mapping[str, Sequence[JudgeAnswer]] | None = None,
        agent_rewards: Sequence[float] = (),
        early: Mapping[int, EarlyRow] | None = None,
    ) -> Scores:
        """Score B responses.

        Args:
            model_scores: B scores by each reward model, or why there is none.
            judge_answers: B answers of each judge.
            agent_rewards: B rewards that the agent gave, if a function returns them.
            early: rows that ``score_early`` scored; they are not scored again. None: no function
                can score early.

        Raises:
            RewardError: with ``on_error="stop"``, a function raised, hung or ended its process.
                Or it returned another number of rewards, or a value that is not a number that
                training can compute with. Names function, response and prompt.
        """
        outcomes = {
            name: _score_here(function, inputs) for name, function in self._in_driver.items()
        }
        normalize: Callable[..., list[float]] = model
        for name in self._models:
            args, scores = self._parts[name].args, (model_scores or {})[name]
            outcomes[name] = {
                row: score if isinstance(score, str) else normalize([score], **args)[0]
                for row, score in enumerate(scores)
            }
        for name in self._config.agent_names:
            outcomes[name] = dict(enumerate(functions.agent(agent_rewards)))
        if self._pool is not None:
            outcomes |= self._score_in_pool(self._pool, inputs, early or {}, judge_answers or {})
        unreadable = {row for name in self._judges for row in self._read(name, outcomes[name])}
        rows = range(len(inputs))
        by_row = [
            [self._check(outcomes[name][row], part) for name, part in self._parts.items()]
            for row in rows
        ]
        is_failed_BK = torch.tensor(
            [[isinstance(outcome, str) for outcome in row] for row in by_row], dtype=torch.bool
        ).view(len(inputs), len(self._parts))
        if is_failed_BK.any():
            self._report(inputs, by_row, is_failed_BK)
        rewards = [[0.0 if isinstance(each, str) else each for each in row] for row in by_row]
        in_time = {row for row, scored in (early or {}).items() if scored.is_in_time}
        return Scores(
            tuple(self._parts),
            torch.tensor([part.weight for part in self._parts.values()], dtype=torch.float32),
            torch.tensor(rewards, dtype=torch.float32).view(is_failed_BK.shape),
            is_failed_BK,
            None if early is None else _mark(in_time, len(inputs)),
            _mark(unreadable, len(inputs)) if self._judges else None,
            is_failed_BK.any(dim=1) if self._config.on_error == "leave_out" else None,
        )

    def close(self) -> None:
        """End the reward processes, if there are any. Twice is a no-op."""
        if self._pool is not None:
            self._pool.close()

    def _score_in_pool(
        self,
        pool: RewardPool,
        inputs: RewardInputs,
        early: Mapping[int, EarlyRow],
        judge_answers: Mapping[str, Sequence[JudgeAnswer]],
    ) -> dict[str, dict[int, Reward]]:
        """Return the rewards of each function by row, or why there is none."""
        names = [*self._scored, *self._judges]
        given = [inputs] * len(self._scored)
        known: list[dict[int, Reward]] = [
            {row: each for row, of in early.items() if (each := of.rewards[number]) is not None}
            for number in range(len(self._scored))
        ]
        for name in self._judges:
            answers = judge_answers[name]
            given.append(replace(inputs, responses=[answer.text for answer in answers]))
            known.append({row: each.failure for row, each in enumerate(answers) if each.failure})
        is_stopping = self._config.on_error == "stop"
        outcomes = pool.score(given, stop_at_failure=is_stopping, known=known)
        for piece, failure in outcomes.failed_calls:
            rewards = outcomes.by_function[piece.function]
            if any(isinstance(rewards[row], str) for row in piece.rows):
                continue
            reason = f"a call with {failure}, though each alone is scored"
            if is_stopping:
                raise RewardError(
                    f"{self._describe_function(names[piece.function])}: {reason}; correct it, or "
                    f"raise reward.timeout_s={self._config.timeout_s:g} if it is only slow"
                )
            if piece.function not in self.early_functions:  # alone there is nothing to compare
                rewards |= dict.fromkeys(piece.rows, reason)
        return dict(zip(names, outcomes.by_function, strict=True))

    def _read(self, judge: str, rewards: dict[int, Reward]) -> set[int]:
        """Give answers without a score their reward; return their rows."""
        missing_score = float(judge_arguments(self._parts[judge])["missing_score"])
        unreadable = {
            row
            for row, reward in rewards.items()
            if isinstance(reward, float) and math.isnan(reward)
        }
        rewards |= dict.fromkeys(unreadable, missing_score)
        return unreadable

    def _check(self, reward: Reward, part: RewardPart) -> Reward:
        if isinstance(reward, str):
            return reward
        if not math.isfinite(reward):
            return f"returned {reward}, must be finite"
        largest = LARGEST_REWARD / (max(1.0, abs(part.weight)) * len(self._parts))
        if abs(reward) > largest:
            return (
                f"returned {reward:g}, must lie within -{largest:g} and {largest:g}, "
                "since advantages are computed in float32; scale the rewards"
            )
        return reward

    def _report(
        self, inputs: RewardInputs, by_row: list[list[Reward]], is_failed_BK: Tensor
    ) -> None:
        """Raise or log the first failure whose reason is its own."""
        failures = [
            (str(by_row[row][part]).startswith("not tried"), row, part)  # a consequence
            for row, part in is_failed_BK.nonzero().tolist()
        ]
        _, row, part = min(failures)
        name = [*self._parts][part]
        message = (
            f"{self._describe_function(name)}: response {row} {shown(inputs.responses[row])} "
            f"to prompt {shown(inputs.prompts[row])}: {by_row[row][part]}"
        )
        if self._config.on_error == "stop":
            raise RewardError(f"{message}; correct it, or set reward.on_error=leave_out")
        num_failed = int(is_failed_BK.any(dim=1).sum())
        done = "scored 0" if self._config.on_error == "zero" else "left out"
        log.warning("%s: num_failed=%d of=%d; %s", done, num_failed, len(inputs), message)

    def _describe_function(self, name: str) -> str:
        key = "reward" if self._config.function else f"reward.functions.{name}"
        return f"{key}.function={self._parts[name].function}"


def _mark(rows: Collection[int], num_rows: int) -> Tensor:
    return torch.tensor([row in rows for row in range(num_rows)], dtype=torch.bool)


def _score_here(function: RewardFunction, inputs: RewardInputs) -> dict[int, Reward]:
    known: dict[int, Reward] = {}

    def emit(row: int, rewards: list[Reward]) -> None:
        known.update(enumerate(rewards, row))

    try:
        function.score(inputs.columns(), emit)
    except Declined as declined:
        return dict.fromkeys(range(len(inputs)), str(declined))
    return known
