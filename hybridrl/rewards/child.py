"""A process that runs reward functions. A script of its own: imports nothing of hybridrl.

``python child.py FD``: FD is a socket to the driver. A message is eight bytes with a length, and as
many bytes of JSON; never pickle, which would execute received code. First message in: paths, names
and arguments of the functions, and the driver's ``sys.path``; then a function's number and the
columns of one call each. Every message has the number of its call, from 0 for the first, and every
answer repeats it. ``{"call": 3, "row": 5, "rewards": [...]}`` has the rewards of the rows from 5
on, numbers or reasons why there is none; a function of one row answers row by row.
``{"call": 3, "failed": reason}`` has none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

HEADER = struct.Struct("!Q")
"""The prefix of a message: its length in bytes."""

BATCH_COLUMNS = ("responses", "answers", "prompts", "sources", "lengths", "conversations")
ROW_COLUMNS = ("response", "answer", "prompt", "source", "length", "conversation")
MAX_CONCURRENT = 64
"""Rows that an asynchronous function scores at a time."""

Message = dict[str, Any]
Reward = float | str
"""A number, or why there is none."""

Emit = Callable[[int, list[Reward]], None]
_PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_MAX_REASON, _MAX_VALUE = 2000, 160  # characters


class RewardFunction:
    """A function, called with the columns that it names: of all rows at once, or row by row."""

    def __init__(
        self, function: Callable[..., Any], args: Mapping[str, object], *, timeout_s: float
    ) -> None:
        """Bind the arguments.

        Raises:
            TypeError: it cannot be called so.
        """
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

    def score(self, columns: Mapping[str, list[Any]], emit: Emit) -> str:
        """Call it, and hand rewards to ``emit`` with the number of their first row.

        Returns:
            The reason why a call with all rows gave no rewards; empty if it did.
        """
        rows = len(columns["responses"])
        if not columns.get("conversations"):  # of single turns they are not sent
            said = [[{"role": "assistant", "text": text}] for text in columns["responses"]]
            columns = {**columns, "conversations": said}
        if not self._is_per_row:
            return self._score_batch(columns, rows, emit)
        if self._is_async:
            asyncio.run(self._score_concurrently(columns, rows, emit))
        else:
            for row in range(rows):
                emit(row, [self._score_row(columns, row)])
        return ""

    def _score_batch(self, columns: Mapping[str, list[Any]], rows: int, emit: Emit) -> str:
        rewards: list[Reward] = []
        num_rewards = 0
        try:
            given = self._function(**self._keywords(columns), **self._args)
            values = asyncio.run(given) if self._is_async else given
            if not isinstance(values, Iterable):
                value = repr(values)[:_MAX_VALUE]
                return f"returned {value}, must be a list: one number a response"
            for value in values:
                num_rewards += 1
                if num_rewards <= rows:  # the others are counted, not kept
                    rewards.append(to_reward(value))
        except (Exception, SystemExit) as error:
            return "raised " + last_line(error)
        if num_rewards != rows:
            return f"returned {num_rewards} rewards for {rows} responses"
        emit(0, rewards)
        return ""

    def _score_row(self, columns: Mapping[str, list[Any]], row: int) -> Reward:
        try:
            return to_reward(self._function(**self._keywords(columns, row), **self._args))
        except (Exception, SystemExit) as error:
            return "raised " + last_line(error)

    async def _score_concurrently(
        self, columns: Mapping[str, list[Any]], rows: int, emit: Emit
    ) -> None:
        free = asyncio.Semaphore(MAX_CONCURRENT)

        async def score(row: int) -> None:
            async with free:
                emit(row, [await self._await_row(columns, row)])

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


def main() -> None:
    """Load the functions, then answer calls until the driver is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.dup2(_STDERR, _STDOUT)  # the output of a reward function is not the driver's
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), _STDIN)
    pid = os.getpid()

    def send(call: int, **answer: object) -> None:
        if os.getpid() != pid:  # a function forked, and this is its copy that came back too
            os._exit(0)
        connection.sendall(encode({"call": call, **answer}))

    functions: list[RewardFunction] | None = None
    while (message := receive(connection)) is not None:
        if functions is None:
            functions, answer = _try_to_load(**message["load"])
            send(message["call"], **answer)
            continue

        def emit(row: int, rewards: list[Reward], call: int = message["call"]) -> None:
            send(call, row=row, rewards=rewards)

        if failure := functions[message["function"]].score(message["columns"], emit):
            send(message["call"], failed=failure)


def encode(message: Message) -> bytes:
    """Return a message as it is sent. Numbers that are not finite are ``NaN`` and ``Infinity``."""
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


def to_reward(value: object) -> Reward:
    """Return a number as it is, and tensors and arrays of one; of other values describe why not."""
    if isinstance(value, BaseException):  # a function may say so of one of its rows
        return f"was not scored: {_shortened(value)}"
    text = isinstance(value, str)
    try:
        return _not_a_number(value) if text else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return _not_a_number(value)


def _not_a_number(value: object) -> str:
    return f"returned {repr(value)[:_MAX_VALUE]!r}, must be a number"


def _shortened(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.removeprefix(f"{type(error).__module__}.")[:_MAX_REASON]


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; None at the end."""
    header = _read(connection, HEADER.size)
    if len(header) < HEADER.size:
        return None
    [size] = HEADER.unpack(header)
    data = _read(connection, size)
    if len(data) < size:
        return None
    message: Message = json.loads(data)
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes, or fewer at the end."""
    data = bytearray()
    try:
        while len(data) < size and (part := connection.recv(min(size - len(data), 1 << 20))):
            data += part
    except ConnectionResetError:  # the driver let go, and had not read all
        return b""
    return bytes(data)


def _try_to_load(
    functions: list[Message], search_path: list[str], timeout_s: float
) -> tuple[list[RewardFunction] | None, Message]:
    folders = dict.fromkeys(os.path.dirname(os.path.abspath(each["path"])) for each in functions)
    folders.pop(os.path.dirname(os.path.abspath(__file__)), None)  # built-in: modules of a package
    sys.path[:] = [*folders, *search_path]
    loaded = []
    for number, each in enumerate(functions):
        try:
            function = load_function(each["path"], each["name"])
            loaded.append(RewardFunction(function, each["args"], timeout_s=timeout_s))
        except (Exception, SystemExit) as error:  # any user code: the driver names it and raises
            return None, {"failed": last_line(error), "function": number}
    return loaded, {"kinds": [function.kind for function in loaded]}


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Import a file once, and return a function that it defines."""
    module = load_module(path)
    members = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in members:
        raise AttributeError(f"no function {name!r} in {path}; it has {sorted(members)}")
    function: Callable[..., Any] = members[name]
    return function


def load_module(path: str) -> ModuleType:
    """Import a file, once."""
    module_name = f"reward_file_{path}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
    return module


def last_line(error: BaseException) -> str:
    """Return error and line, for example ``ValueError: no digits (reward.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{_shortened(error)} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


if __name__ == "__main__":
    main()
