"""Reward functions, called with the columns that they name; a service of ``processes/child.py``.

A call has a function's number and the columns of some rows. ``{"row": 5, "rewards": [...]}`` has
the rewards of the rows from 5 on, numbers or reasons why there is none; a function of one row
answers row by row.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybridrl.processes.child import (
    Declined,
    Emit,
    Message,
    Service,
    declined_as,
    error_text,
    last_line,
    load_function,
)

BATCH_COLUMNS = ("responses", "answers", "prompts", "sources", "lengths", "conversations")
ROW_COLUMNS = ("response", "answer", "prompt", "source", "length", "conversation")
MAX_CONCURRENT = 64
"""Rows that an asynchronous function scores at a time."""

Reward = float | str
"""A number, or why there is none."""

_PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD
_MAX_VALUE = 160  # characters


class RewardFunction:
    """A function, called with the columns that it names: of all rows at once, or row by row."""

    def __init__(
        self, function: Callable[..., Any], args: Mapping[str, object], *, timeout_s: float
    ) -> None:
        """Bind the arguments; TypeError if it cannot be called so."""
        signature = inspect.signature(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self._is_per_row = not kinds.keys().isdisjoint(ROW_COLUMNS)
        self._is_async = inspect.iscoroutinefunction(function)
        self._timeout_s = timeout_s
        self._args = {**args, **({"timeout_s": timeout_s} if "timeout_s" in kinds else {})}
        self._function = function
        columns = ROW_COLUMNS if self._is_per_row else BATCH_COLUMNS
        self._names = {
            column: name
            for column, name in zip(BATCH_COLUMNS, columns, strict=True)
            if name in kinds or takes_all
        }
        if self._is_per_row and (mixed := [name for name in BATCH_COLUMNS if name in kinds]):
            raise TypeError(f"{mixed[0]!r} has all rows and others of its columns one row: choose")
        for name, parameter in signature.parameters.items():
            is_bound = name in (*BATCH_COLUMNS, *ROW_COLUMNS, *self._args)
            if parameter.kind is _PLAIN and parameter.default is inspect.Parameter.empty:
                self._names |= {} if is_bound else {name: name}  # a column of the data
        try:
            signature.bind(**dict.fromkeys(self._names.values()), **self._args)
        except TypeError as error:
            raise TypeError(
                f"{error}; it gets the columns {', '.join(columns)} and its arguments of "
                "reward.args by keyword: take those you need"
            ) from error

    @property
    def kind(self) -> str:
        """``batch``, ``row``, or ``concurrent`` for rows that are awaited together."""
        if not self._is_per_row:
            return "batch"
        return "concurrent" if self._is_async else "row"

    def score(self, columns: Mapping[str, list[Any]], emit: Emit) -> None:
        """Call it, and hand ``rewards`` to ``emit`` with the number of their first ``row``.

        Declined: a call with all rows gave no rewards.
        """
        rows = len(columns["responses"])
        if not columns.get("conversations"):  # of single turns they are not sent
            said = [[{"role": "assistant", "text": text}] for text in columns["responses"]]
            columns = {**columns, "conversations": said}
        if not self._is_per_row:
            self._score_batch(columns, rows, emit)
        elif self._is_async:
            asyncio.run(self._score_concurrently(columns, rows, emit))
        else:
            for row in range(rows):
                try:
                    value = self._function(**self._keywords(columns, row), **self._args)
                    reward = to_reward(value)
                except (Exception, SystemExit) as error:
                    reward = "raised " + last_line(error)
                emit(row=row, rewards=[reward])

    def _score_batch(self, columns: Mapping[str, list[Any]], rows: int, emit: Emit) -> None:
        rewards: list[Reward] = []
        num_rewards = 0
        try:
            given = self._function(**self._keywords(columns), **self._args)
            values = asyncio.run(given) if self._is_async else given
            if not isinstance(values, Iterable):
                value = repr(values)[:_MAX_VALUE]
                raise Declined(f"returned {value}, must be a list: one number a response")
            for value in values:
                num_rewards += 1
                if num_rewards <= rows:  # the others are counted, not kept
                    rewards.append(to_reward(value))
        except Declined:
            raise
        except (Exception, SystemExit) as error:
            raise Declined(f"raised {last_line(error)}") from error
        if num_rewards != rows:
            raise Declined(f"returned {num_rewards} rewards for {rows} responses")
        emit(row=0, rewards=rewards)

    async def _score_concurrently(
        self, columns: Mapping[str, list[Any]], rows: int, emit: Emit
    ) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def score(row: int) -> None:
            async with free:
                emit(row=row, rewards=[await self._await_row(columns, row)])

        await asyncio.gather(*(score(row) for row in range(rows)))

    async def _await_row(self, columns: Mapping[str, list[Any]], row: int) -> Reward:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return to_reward(await self._function(**self._keywords(columns, row), **self._args))
        except (Exception, SystemExit) as error:
            if limit.expired():
                return f"took longer than {self._timeout_s:g} s"
            return "raised " + last_line(error)

    def _keywords(
        self, columns: Mapping[str, list[Any]], row: int | None = None
    ) -> dict[str, object]:
        return {
            name: columns[column] if row is None else columns[column][row]
            for column, name in self._names.items()
        }


def load(functions: Sequence[Message], timeout_s: float) -> tuple[Service, list[str]]:
    """Load functions; return their service, and the kind of each."""
    folders = dict.fromkeys(os.path.dirname(os.path.abspath(each["path"])) for each in functions)
    folders.pop(os.path.dirname(os.path.abspath(__file__)), None)  # built-in: modules of a package
    sys.path[:0] = folders
    loaded: list[RewardFunction] = []
    for number, each in enumerate(functions):
        with declined_as(number):
            function = load_function(each["path"], each["name"])
            loaded.append(RewardFunction(function, each["args"], timeout_s=timeout_s))

    def score(message: Message, emit: Emit) -> None:
        loaded[message["function"]].score(message["columns"], emit)

    return score, [function.kind for function in loaded]


def to_reward(value: object) -> Reward:
    """Return a number as it is, and tensors and arrays of one; of other values describe why not."""
    if isinstance(value, BaseException):  # a function may say so of one of its rows
        return f"was not scored: {error_text(value)}"
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
    return f"returned {repr(value)[:_MAX_VALUE]!r}, must be a number"
