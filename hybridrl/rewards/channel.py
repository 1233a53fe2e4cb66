"""The driver's end of the socket to a reward process, which it does not trust.

Whatever a user's function, its forks and threads do to the socket, it costs at most the time of the
call. Lengths are bounded and every read has a deadline. An answer counts only with the number of
the current call, and once for each row.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping

from hybridrl.rewards.child import HEADER, Reward, encode

_ANSWER_BYTES, _REWARD_BYTES = 1 << 16, 1 << 14
"""Largest size of an answer: a constant, and an amount per reward."""

_LOOK_S = 0.2
"""Seconds of one wait; what it takes longer is time in which this process was stopped (Ctrl-Z)."""

KINDS = ("batch", "row", "concurrent")
"""How functions are called: with all rows, with one row, or with one row and many at a time."""


class ChannelClosed(Exception):
    """The process let go of its end: it has ended, or ends."""


class Refused(Exception):
    """The process answered that it has no rewards; says why, and for which function."""

    def __init__(self, reason: str, function: int = 0) -> None:
        super().__init__(reason)
        self.function = function


class Garbage(Exception):
    """The bytes on the socket are not a valid answer; the message describes them."""


class Channel:
    """Numbered calls, and their answers.

    What sends or receives raises TimeoutError if the process is late, and ChannelClosed if it
    ended. What receives also raises Refused, if the answer is an error instead of a result, and
    Garbage, if it is not valid: neither are later bytes on the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Own one end of a pair of sockets."""
        self._connection = connection
        self._number = -1
        self._stopped_s = 0.0

    def close(self) -> None:
        """Let go. Twice is a no-op."""
        self._connection.close()

    def send(self, message: Mapping[str, object], *, timeout_s: float) -> None:
        """Begin the next call.

        Raises:
            TimeoutError: the process did not read all of it in time.
        """
        self._number += 1
        self._connection.settimeout(max(timeout_s, 1e-3))  # of all of it together
        try:
            self._connection.sendall(encode({**message, "call": self._number}))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed from error

    def receive_kinds(self, *, num_functions: int, timeout_s: float) -> tuple[str, ...]:
        """Return the kinds of the loaded functions: the answer to the first message."""
        answer = self._next_answer(_ANSWER_BYTES, timeout_s)
        kinds = answer.get("kinds")
        if not isinstance(kinds, list) or len(kinds) != num_functions:
            raise Garbage("answered with text that is not a list of functions")
        if not all(kind in KINDS for kind in kinds):
            raise Garbage("answered with text that is not a list of functions")
        return tuple(kinds)

    def receive(self, *, num_rewards: int, timeout_s: float) -> Iterator[tuple[int, list[Reward]]]:
        """Yield the rewards of the current call as they come, with the number of their first row.

        Args:
            timeout_s: seconds until the first answer, and from one answer to the next.
        """
        max_bytes = _ANSWER_BYTES + num_rewards * _REWARD_BYTES
        missing = set(range(num_rewards))
        while missing:
            answer = self._next_answer(max_bytes, timeout_s)
            row, rewards = _rewards_of(answer)
            rows = range(row, row + len(rewards))
            if not rows or not missing.issuperset(rows):
                raise Garbage("answered with rewards of rows that were not asked for")
            missing.difference_update(rows)
            yield row, rewards

    def receive_text(self, *, max_bytes: int, timeout_s: float) -> str:
        """Return the text that answers the current call."""
        text = self._next_answer(max_bytes, timeout_s).get("text")
        if not isinstance(text, str):
            raise Garbage("answered with something that is not a text")
        return text

    def _next_answer(self, max_bytes: int, timeout_s: float) -> dict[str, object]:
        deadline = self._now() + timeout_s
        while True:
            [size] = HEADER.unpack(self._read(HEADER.size, deadline))
            if size > max_bytes:
                raise Garbage(f"answered with {size} bytes, more than {max_bytes}")
            answer = _parse(self._read(size, deadline))
            number = answer.get("call")
            if number == self._number:
                return _accepted(answer)
            if not isinstance(number, int) or not 0 <= number < self._number:
                raise Garbage("answered with text that is not an answer to a call")
            # The answer to an earlier call, which timed out or was answered twice.

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            remaining_s = deadline - self._now()
            if remaining_s <= 0:
                raise TimeoutError
            wait_s = min(remaining_s, _LOOK_S)
            self._connection.settimeout(wait_s)
            ready_s = self._now() + wait_s
            try:
                part = self._connection.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelClosed from error
            finally:
                self._stopped_s += max(0.0, self._now() - ready_s)
            if not part:
                raise ChannelClosed
            data += part
        return bytes(data)

    def _now(self) -> float:
        """Return seconds on a clock that stands still while this process is stopped."""
        return time.monotonic() - self._stopped_s


def _parse(data: bytes) -> dict[str, object]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Garbage("answered with text that is not JSON") from error
    if not isinstance(answer, dict):
        raise Garbage("answered with text that is not an answer to a call")
    return answer


def _accepted(answer: dict[str, object]) -> dict[str, object]:
    if isinstance(reason := answer.get("failed"), str):
        number = answer.get("function")
        raise Refused(reason, number if isinstance(number, int) else 0)
    return answer


def _rewards_of(answer: Mapping[str, object]) -> tuple[int, list[Reward]]:
    row, rewards = answer.get("row", 0), answer.get("rewards")
    if not isinstance(row, int) or not isinstance(rewards, list):
        raise Garbage("answered with text that is not a list of rewards")
    if not all(type(value) in (float, str) for value in rewards):
        raise Garbage("answered with text that is not a list of rewards")
    return row, rewards
