"""The process that runs a user's reward function. A script of its own: imports nothing of hybridrl.

``python child.py FD``: FD is a socket to the driver. First message in: path, function name and the
driver's ``sys.path``; first answer: ``("ready", [])`` or ``("failed", [reason])``. Then one answer
for each message of keyword arguments: ``("rewards", values)`` or ``("failed", [reason])``.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

COLUMNS = ("responses", "answers", "prompts", "sources")
Arguments = dict[str, list[str]]
RewardFunction = Callable[..., Iterable[object]]
_STDOUT, _STDERR = 1, 2


def main() -> None:
    """Load the function, then answer calls until the driver is gone."""
    connection = Connection(int(sys.argv[1]))
    os.dup2(_STDERR, _STDOUT)  # what a reward function prints is not the driver's output
    path, name, search_path = connection.recv()
    sys.path[:] = [os.path.dirname(os.path.abspath(path)), *search_path]
    try:
        function = _load(path, name)
    except (Exception, SystemExit) as error:  # any user code: the driver names it and raises
        connection.send(("failed", [_last_line(error)]))
        return
    connection.send(("ready", []))
    calls: queue.SimpleQueue[Arguments] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    while True:
        connection.send(_call(function, calls.get()))


def _receive(connection: Connection, calls: queue.SimpleQueue[Arguments]) -> None:
    """Take calls in a thread of its own, to notice the driver's end while the function hangs."""
    while True:
        try:
            calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


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


def _call(function: RewardFunction, arguments: Arguments) -> tuple[str, list[float | str]]:
    try:
        return "rewards", [_to_number(value) for value in function(**arguments)]
    except (Exception, SystemExit) as error:
        return "failed", ["raised " + _last_line(error)]


def _to_number(value: object) -> float | str:
    """Return what is no number (nor a tensor or array that holds one) as text, for a message."""
    try:
        return repr(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return repr(value)


def _last_line(error: BaseException) -> str:
    """Return error and place, for example ``ValueError: no digits (reward.py:12)``."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


if __name__ == "__main__":
    main()
