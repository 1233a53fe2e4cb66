"""The process that runs a user's reward function. A script of its own: imports nothing of hybridrl.

``python child.py FD``: FD is a socket to the driver. A message is eight bytes with a length, and as
many bytes of JSON; never pickle, which would execute received code. First message in: path and
name of the function and the driver's ``sys.path``; then the columns of one call each. Every message
has the number of its call, from 0 for the first, and every answer repeats it: ``{"call": 3,
"rewards": [...]}`` or ``{"call": 3, "failed": reason}``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

HEADER = struct.Struct("!Q")
"""The prefix of a message: its length in bytes."""

COLUMNS = ("responses", "answers", "prompts", "sources")
Message = dict[str, Any]
RewardFunction = Callable[..., Iterable[object]]
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_MAX_REASON, _MAX_VALUE = 2000, 160  # characters


def main() -> None:
    """Load the function, then answer calls until the driver is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.dup2(_STDERR, _STDOUT)  # the output of a reward function is not the driver's
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), _STDIN)
    pid = os.getpid()
    function: RewardFunction | None = None
    while (message := _receive(connection)) is not None:
        if function is None:
            function, answer = _try_to_load(**message["load"])
        else:
            answer = _call(function, message["columns"])
        if os.getpid() != pid:  # the function forked, and this is its copy that came back too
            os._exit(0)
        connection.sendall(encode(answer | {"call": message["call"]}))


def encode(message: Message) -> bytes:
    """Return a message as it is sent. Numbers that are not finite are ``NaN`` and ``Infinity``."""
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


def _receive(connection: socket.socket) -> Message | None:
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
    path: str, name: str, search_path: list[str]
) -> tuple[RewardFunction | None, Message]:
    sys.path[:] = [os.path.dirname(os.path.abspath(path)), *search_path]
    try:
        return _load(path, name), {"rewards": []}
    except (Exception, SystemExit) as error:  # any user code: the driver names it and raises
        return None, {"failed": _last_line(error)}


def _load(path: str, name: str) -> RewardFunction:
    spec = importlib.util.spec_from_file_location("reward_file", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    members = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in members:
        raise AttributeError(f"no function {name!r} in {path}; it has {sorted(members)}")
    try:
        inspect.signature(members[name]).bind(**dict.fromkeys(COLUMNS))
    except TypeError as error:
        raise TypeError(
            f"{error}; it is called with the keywords {', '.join(COLUMNS)}: take those you need, "
            "and **_ for the rest"
        ) from error
    function: RewardFunction = members[name]
    return function


def _call(function: RewardFunction, columns: dict[str, list[str]]) -> Message:
    num_responses = len(columns["responses"])
    rewards: list[float | str] = []
    num_rewards = 0
    try:
        for value in function(**columns):
            num_rewards += 1
            if num_rewards <= num_responses:  # the others are counted, not kept
                rewards.append(_to_number(value))
    except (Exception, SystemExit) as error:
        return {"failed": "raised " + _last_line(error)}
    if num_rewards != num_responses:
        return {"failed": f"returned {num_rewards} rewards for {num_responses} responses"}
    return {"rewards": rewards}


def _to_number(value: object) -> float | str:
    """Describe a value that is not a number, nor a tensor or array of one, for a message."""
    try:
        return repr(value)[:_MAX_VALUE] if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return repr(value)[:_MAX_VALUE]


def _last_line(error: BaseException) -> str:
    """Return error and line, for example ``ValueError: no digits (reward.py:12)``."""
    text = "".join(traceback.format_exception_only(error)).strip()[:_MAX_REASON]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


if __name__ == "__main__":
    main()
