"""A process that plays environments. It loads the file once, and forks a copy for each of them.

A copy is made in milliseconds, has all imports, and can be killed without the others. Messages on
the control socket are packets of JSON: ``{"begin": 3}`` comes with the socket of environment 3, and
``{"end": 3}`` kills it. Each copy answers ``{"reset": [row, seed]}``, ``{"step": text}`` and
``{"close": true}``. Printed text goes nowhere.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hybridrl.agents.observations import Observed, arguments_of_reset, read_reset, read_step
from hybridrl.agents.tool_child import silent_connection, to_text
from hybridrl.data.rows import read_record
from hybridrl.json_text import to_json_text
from hybridrl.rewards.child import Message, encode, last_line, load_module, receive

PACKET_BYTES = 1 << 16
_MAX_REASON = 2000  # characters


def main(descriptor: int) -> None:
    """Begin and end environments until the other end of the socket is closed."""
    control = silent_connection(descriptor)
    load = json.loads(control.recv(PACKET_BYTES))
    try:
        factory, answer = vars(load_module(load["path"]))[load["name"]], {"text": "loaded"}
    except (Exception, SystemExit) as error:  # any user code: the other end names it
        control.send(encode_packet({"failed": last_line(error)}))
        return
    control.send(encode_packet(answer))
    pids: dict[int, int] = {}
    while True:
        packet, sockets, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not packet:
            return
        message = json.loads(packet)
        if "begin" in message:
            pids[message["begin"]] = _fork(factory, control, sockets[0], load["max_chars"])
        elif (pid := pids.pop(message["end"], None)) is not None:
            _kill(pid)


def encode_packet(message: Message) -> bytes:
    """Return a message of the control socket."""
    return to_json_text(message).encode()[:PACKET_BYTES]


def _fork(
    factory: Callable[[], Any], control: socket.socket, descriptor: int, max_chars: int
) -> int:
    """Start a copy that plays one environment, and return its number."""
    pid = os.fork()
    if pid:
        os.close(descriptor)
        with suppress(OSError):  # it may have ended
            os.setpgid(pid, pid)
        return pid
    try:
        control.close()
        with suppress(OSError):  # the parent was first
            os.setpgid(0, 0)
        _play(factory, socket.socket(fileno=descriptor), max_chars=max_chars)
    finally:
        os._exit(0)


def _kill(pid: int) -> None:
    """Kill an environment and the processes of its group, and read its status."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _play(factory: Callable[[], Any], connection: socket.socket, *, max_chars: int) -> None:
    pid, environment = os.getpid(), None
    while (message := receive(connection)) is not None:
        try:
            environment = factory() if environment is None else environment
            answer = _answer(environment, message, max_chars)
        except (Exception, SystemExit) as error:  # any user code
            answer = {"failed": to_text(last_line(error), max_chars=_MAX_REASON)}
        if os.getpid() != pid:  # the environment forked, and this is its copy that came back too
            os._exit(0)
        connection.sendall(encode(answer))


def _answer(environment: Any, message: Message, max_chars: int) -> Message:  # noqa: ANN401
    if "reset" in message:
        record, seed = message["reset"]
        row = read_record(record.encode(), origin="")
        given = arguments_of_reset(environment.reset, row, seed)
        value = environment.reset(**given)
        observed = read_reset(value, is_gymnasium="row" not in given, max_chars=max_chars)
    elif "step" in message:
        observed = read_step(environment.step(message["step"]), max_chars=max_chars)
    else:
        getattr(environment, "close", bool)()
        observed = Observed()
    return {"observed": observed.to_json()}
