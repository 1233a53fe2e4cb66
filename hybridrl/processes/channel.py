"""The caller's end of the socket to a child, which it does not trust.

Whatever a user's function, its forks and threads do to the socket, it costs at most the time of the
call. Lengths are bounded and every read has a deadline. An answer counts only with the number of
the current call.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping

from hybridrl.processes.child import HEADER, Message, encode

_LOOK_S = 0.2
"""Seconds of one wait; what it takes longer is time in which this process was stopped (Ctrl-Z)."""

_PART_BYTES = 1 << 20
_NO_CALL = "answered with text that is not an answer to a call"


class CallFailed(Exception):
    """A call gave no result; says why."""


class Refused(CallFailed):
    """The child answered that it has no result; says why, and for which function."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


class ChannelClosed(Exception):
    """The child let go of its end: it has ended, or ends."""


class Garbage(Exception):
    """The bytes on the socket are not a valid answer; the message describes them."""


class Channel:
    """Numbered calls, and their answers.

    What sends or receives raises TimeoutError if the child is late, and ChannelClosed if it ended.
    What receives also raises Refused, if the answer is an error instead of a result, and Garbage,
    if it is not valid: neither are later bytes on the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Own one end of a pair of sockets."""
        self._connection = connection
        self._number = -1
        self._received = bytearray()
        self._stopped_s = 0.0

    def close(self) -> None:
        """Let go. Twice is a no-op."""
        self._connection.close()

    def send(self, message: Mapping[str, object], *, timeout_s: float) -> None:
        """Begin the next call."""
        data = self._number_next(message)
        self._connection.settimeout(max(timeout_s, 1e-3))  # of all of it together
        try:
            self._connection.sendall(data)
        except TimeoutError as error:
            raise TimeoutError("did not read its input within") from error
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, *, max_bytes: int, timeout_s: float) -> Message:
        """Return the next answer to the current call."""
        deadline = self._now() + timeout_s
        while (answer := self._take(max_bytes)) is None:
            remaining_s = deadline - self._now()
            if remaining_s <= 0:
                raise TimeoutError("took longer than")
            self._receive_part(min(remaining_s, _LOOK_S))
        return answer

    async def ask(self, message: Mapping[str, object], *, max_bytes: int) -> Message:
        """Call, and return the answer; the event loop is not held up. The caller has a deadline."""
        loop = asyncio.get_running_loop()
        try:
            self._connection.setblocking(False)  # noqa: FBT003
            await loop.sock_sendall(self._connection, self._number_next(message))
            while (answer := self._take(max_bytes)) is None:
                self._keep(await loop.sock_recv(self._connection, _PART_BYTES))
        except OSError as error:
            raise ChannelClosed from error
        return answer

    def order(self, message: Mapping[str, object], *, descriptor: int | None = None) -> None:
        """Send a message that nothing answers, with an open file behind it if one is given."""
        self._connection.sendall(encode({**message}))
        if descriptor is not None:
            socket.send_fds(self._connection, [b"\0"], [descriptor])

    def _number_next(self, message: Mapping[str, object]) -> bytes:
        self._number += 1
        return encode({**message, "call": self._number})

    def _take(self, max_bytes: int) -> Message | None:
        """Return the next answer to the current call that has been received; None if none has."""
        while len(self._received) >= HEADER.size:
            [size] = HEADER.unpack_from(self._received)
            if size > max_bytes:
                raise Garbage(f"answered with {size} bytes, more than {max_bytes}")
            end = HEADER.size + size
            if len(self._received) < end:
                return None
            answer = _parse(bytes(self._received[HEADER.size : end]))
            del self._received[:end]
            number = answer.get("call")
            if number == self._number:
                return _accepted(answer)
            if not isinstance(number, int) or not 0 <= number < self._number:
                raise Garbage(_NO_CALL)
            # The answer to an earlier call, which timed out or was answered twice.
        return None

    def _receive_part(self, wait_s: float) -> None:
        self._connection.settimeout(wait_s)
        ready_s = self._now() + wait_s
        try:
            self._keep(self._connection.recv(_PART_BYTES))
        except TimeoutError:
            return
        except OSError as error:
            raise ChannelClosed from error
        finally:
            self._stopped_s += max(0.0, self._now() - ready_s)

    def _keep(self, part: bytes) -> None:
        if not part:
            raise ChannelClosed
        self._received += part

    def _now(self) -> float:
        """Return seconds on a clock that stands still while this process is stopped."""
        return time.monotonic() - self._stopped_s


def _parse(data: bytes) -> Message:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Garbage("answered with text that is not JSON") from error
    if not isinstance(answer, dict):
        raise Garbage(_NO_CALL)
    return answer


def _accepted(answer: Message) -> Message:
    if isinstance(reason := answer.get("failed"), str):
        number = answer.get("number")
        raise Refused(reason, number if isinstance(number, int) else 0)
    return answer
