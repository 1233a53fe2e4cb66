"""A child: it loads a service, and answers calls until the other end is gone.

A message is eight bytes with a length, and as many bytes of JSON; never pickle, which would execute
received code. The first one names a module, whose function ``load`` makes the service of further
entries; see `Service`. Every message has the number of its call, from 0 for the first, and every
answer repeats it. ``{"call": 3, "failed": reason}`` has no result.

``{"fork": 7}`` comes with another socket: a copy of this process, with all that was loaded, answers
there. ``{"end": 7}`` kills the copy.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import socket
import struct
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

HEADER = struct.Struct("!Q")
"""The prefix of a message: its length in bytes."""

Message = dict[str, Any]

Emit = Callable[..., None]
"""Sends its keywords as an answer to the call."""

Service = Callable[[Message, Emit], None]
"""Answers a call, once or several times. Its errors, too, are answers."""

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_MAX_REASON = 2000  # characters


class Declined(Exception):
    """There is no result, for a reason that names itself; ``number`` is the function's, if any."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


@contextmanager
def declined_as(number: int) -> Iterator[None]:
    """Turn an error of a user's code in the block into Declined of this number."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Declined(last_line(error), number) from error


def main(descriptor: int) -> None:
    """Load the service and answer calls."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, _STDIN)
    services: list[Service] = []

    def load(message: Message, emit: Emit) -> None:
        if message["is_silent"]:  # what is printed may be a gigabyte
            os.dup2(nothing, _STDERR)
        os.dup2(_STDERR, _STDOUT)
        service, loaded = importlib.import_module(message["service"]).load(**message["load"])
        services.append(service)
        emit(loaded=loaded)

    with suppress(ConnectionError):  # the other end is gone
        if (first := receive(connection)) is not None:
            _answer(connection, load, first)
        if services:
            _serve(connection, services[0])


def encode(message: Message) -> bytes:
    """Return a message as it is sent. Numbers that are not finite are ``NaN`` and ``Infinity``."""
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


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
    module_name = f"user_file_{os.path.abspath(path)}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]  # else the next call would return it half made
            raise
    return module


def last_line(error: BaseException) -> str:
    """Return error and line, for example ``ValueError: no digits (reward.py:12)``.

    The line is the last one of a user's file, if there is one: not that of what it called.
    """
    frames = traceback.extract_tb(error.__traceback__)
    python, packages = map(sysconfig.get_path, ("stdlib", "purelib"))
    no_users = ("<", python, packages, f"{Path(__file__).parents[1]}/")
    own = [frame for frame in frames if not frame.filename.startswith(no_users)]
    last = (own or frames)[-1]
    return f"{error_text(error)} ({os.path.basename(last.filename)}:{last.lineno})"


def error_text(error: BaseException) -> str:
    """Return a bounded text that UTF-8 can hold, for example ``ValueError: no digits``."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text = text.removeprefix(f"{type(error).__module__}.")[:_MAX_REASON]
    return text.encode(errors="replace").decode()


def _serve(connection: socket.socket, service: Service) -> None:
    copies: dict[int, int] = {}
    while (message := receive(connection)) is not None:
        if "fork" in message:
            copies[message["fork"]] = _fork(connection, service)
        elif "end" not in message:
            _answer(connection, service, message)
        elif (pid := copies.pop(message["end"], None)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _answer(connection: socket.socket, service: Service, message: Message) -> None:
    pid = os.getpid()

    def emit(**answer: object) -> None:
        if os.getpid() != pid:  # the service forked, and this is its copy that came back too
            os._exit(0)
        connection.sendall(encode({**answer, "call": message["call"]}))

    try:
        service(message, emit)
    except Declined as declined:
        emit(failed=str(declined), number=declined.number)
    except (Exception, SystemExit) as error:  # any user code: the other end names it
        emit(failed=f"raised {last_line(error)}")


def _fork(connection: socket.socket, service: Service) -> int:
    """Start a copy that answers at a socket of its own, and return its number."""
    _, [descriptor], _, _ = socket.recv_fds(connection, 1, 1)
    pid = os.fork()
    if pid:
        os.close(descriptor)
        with suppress(OSError):  # it may have ended
            os.setpgid(pid, pid)
        return pid
    try:
        connection.close()
        with suppress(OSError):  # the parent was first
            os.setpgid(0, 0)
        _serve(socket.socket(fileno=descriptor), service)
    finally:
        os._exit(0)


def _read(connection: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes, or fewer at the end."""
    data = bytearray()
    try:
        while len(data) < size and (part := connection.recv(min(size - len(data), 1 << 20))):
            data += part
    except ConnectionResetError:  # the other end let go, and had not read all
        return b""
    return bytes(data)
