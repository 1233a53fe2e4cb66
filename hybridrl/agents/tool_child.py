"""A process that runs tools. First message in: the functions; then one call a message.

Every message has the number of its call, which the answer repeats: ``{"call": 3, "text": ".."}``,
or ``{"call": 3, "failed": reason}``. Printed text goes nowhere: a tool may print a gigabyte.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.json_text import to_json_text
from hybridrl.rewards.child import Message, encode, last_line, load_function, receive


def main(descriptor: int) -> None:
    """Answer calls until the other end of the socket is closed."""
    connection = silent_connection(descriptor)
    pid, max_chars = os.getpid(), 0
    functions: list[Callable[..., Any]] = []
    while (message := receive(connection)) is not None:
        if "load" in message:
            max_chars = message["max_chars"]
            functions, answer = _load(message["load"])
        else:
            function = functions[message["function"]]
            answer = _call(function, message["arguments"], max_chars=max_chars)
        if os.getpid() != pid:  # a tool forked, and this is its copy that came back too
            os._exit(0)
        connection.sendall(encode({"call": message["call"], **answer}))


def silent_connection(descriptor: int) -> socket.socket:
    """Return the socket to the parent; standard input is empty, and printed text goes nowhere."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    return connection


def to_text(value: object, *, max_chars: int) -> str:
    """Return the result of a tool as the model reads it: a text as it is, others as JSON.

    Long text loses its middle; text that UTF-8 cannot hold gets question marks.

    Raises:
        TypeError: JSON cannot hold the value.
        ValueError: likewise: it contains itself, or a number with thousands of digits.
    """
    text = value if isinstance(value, str) else to_json_text(value, keeps_unicode=True)
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return text.encode(errors="replace").decode()


def _load(names: Sequence[tuple[str, str]]) -> tuple[list[Callable[..., Any]], Message]:
    functions = []
    for number, (path, name) in enumerate(names):
        try:
            functions.append(load_function(path, name))
        except (Exception, SystemExit) as error:  # any user code: the other end names it
            return [], {"failed": last_line(error), "function": number}
    return functions, {"text": "loaded"}


def _call(function: Callable[..., Any], arguments: Message, *, max_chars: int) -> Message:
    try:
        return {"text": to_text(function(**arguments), max_chars=max_chars)}
    except (Exception, SystemExit) as error:
        return {"failed": to_text(last_line(error), max_chars=max_chars)}
