"""Children that call foreign code and can be killed, one or several, and the sockets to them.

A thread cannot be killed, and a fork of this process would copy running threads of Ray and torch.
So a child is a fresh interpreter (60 ms, plus its imports). It has a session of its own, so Ctrl-C
does not reach it. All processes and daemons that it starts die with it: see ``guard.py``.

A child is not trusted: whatever a user's function, its forks and threads do to the socket, it costs
at most the time of the call. Lengths are bounded, every read has a deadline, and an answer counts
only with the number of the current call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from hybridrl.json_text import to_json_text
from hybridrl.processes.child import HEADER, Message, encode
from hybridrl.processes.guard import end_guarded, guarded

_LOOK_S = 0.2
"""Seconds of one wait; what it takes longer is time in which this process was stopped (Ctrl-Z)."""

_ORDER_S = 20.0
"""Seconds in which orders must fit: 200 fill a socket while a large process is being copied."""

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
            wait_s = min(remaining_s, _LOOK_S)
            ready_s = self._now() + wait_s
            self._connection.settimeout(wait_s)
            try:
                self._keep(self._connection.recv(_PART_BYTES))
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelClosed from error
            finally:
                self._stopped_s += max(0.0, self._now() - ready_s)
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
        self._connection.settimeout(_ORDER_S)
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
            if number == self._number and isinstance(reason := answer.get("failed"), str):
                function = answer.get("number")
                raise Refused(reason, function if isinstance(function, int) else 0)
            if number == self._number:
                return answer
            if not isinstance(number, int) or not 0 <= number < self._number:
                raise Garbage(_NO_CALL)
            # The answer to an earlier call, which timed out or was answered twice.
        return None

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


log = logging.getLogger(__name__)

# The search path comes first: only with it can the process import this package.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.processes.child import main; main(int(sys.argv[2]))"
)
_LOAD_BYTES = 1 << 16

_KILLED = tuple(
    -number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
)
"""Signals of processes that were killed from outside, and did not crash."""

T = TypeVar("T")


class CallHung(CallFailed):
    """A call took longer than it may, and was killed."""


class CallKilled(CallFailed):
    """The process was killed from outside."""


class LoadFailed(CallFailed):
    """A service cannot be loaded; names the function."""


class Child:
    """One process with a service: a function of answers, made by ``load`` of a module.

    `start` it before each call: where the process is gone, that starts another. One thread calls at
    a time.
    """

    def __init__(
        self,
        service: str,
        load: Mapping[str, object],
        *,
        names: Sequence[str],
        timeout_s: float,
        load_timeout_s: float = 60.0,
        is_silent: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            service: the module; its ``load`` returns a `child.Service` and a value for ``loaded``.
            load: arguments of ``load``, as JSON holds them.
            names: of the functions, as messages show them: ``agent.tools=file.py:function``.
            timeout_s: seconds that a call may take.
            load_timeout_s: seconds from the start of the process until it has loaded.
            is_silent: what the service prints goes nowhere; else to standard error.
        """
        self.names = names
        self.timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self.loaded: Any = None
        """The value that ``load`` returned beside the service."""
        self._first = {"service": service, "load": load, "is_silent": is_silent}
        self._lock = threading.Lock()
        self._is_ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._numbers = count()

    def start(self) -> None:
        """Start the process and load the service, unless it runs; LoadFailed if that fails."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            if self._channel is not None:  # else the reason is known
                log.warning(
                    "the process of %s %s between calls; it is started again",
                    *(self.names[0], _describe_end(status)),
                )
            self.drop()
        self._channel = self._open()
        try:
            with _failures(self.drop, timeout_s := self._load_timeout_s):
                self._channel.send(self._first, timeout_s=timeout_s)
                answer = self._channel.receive(max_bytes=_LOAD_BYTES, timeout_s=timeout_s)
                self.loaded = answer.get("loaded")
        except CallFailed as failure:
            self.drop()
            number = failure.number if isinstance(failure, Refused) else 0
            name = self.names[min(max(0, number), len(self.names) - 1)]  # it is the child's
            raise LoadFailed(f"{name} cannot be loaded: {failure}") from failure

    @contextmanager
    def call(
        self,
        message: Mapping[str, object],
        *,
        max_bytes: int,
        timeout_s: float | None = None,
        grace_s: float = 0.0,
    ) -> Iterator[Callable[[], Message]]:
        """Begin a call; yield a function that returns its next answer.

        ``timeout_s`` is what is left of ``self.timeout_s``, None all of it; ``grace_s`` is added to
        the wait for answers.

        CallFailed: there is no result. So is a Garbage that the block raises. If the process hung,
        or sent something else, it was ended.
        """
        if self._channel is None:
            raise CallFailed("its process has ended")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        with _failures(self.drop, self.timeout_s):
            self._channel.send(message, timeout_s=timeout_s)
            remaining_s = deadline - time.monotonic() + grace_s
            yield partial(self._channel.receive, max_bytes=max_bytes, timeout_s=remaining_s)

    def fork(self) -> Copy:
        """Copy the process, loaded service included, in milliseconds; CallFailed if it ended."""
        if self._channel is None:
            raise CallFailed("its process has ended")
        number = next(self._numbers)
        parent_end, child_end = socket.socketpair()
        copy = Copy(Channel(parent_end), partial(self._end_copy, number), self.timeout_s)
        with child_end:
            try:
                self._channel.order({"fork": number}, descriptor=child_end.fileno())
            except OSError as error:
                copy.end()
                raise CallFailed("its process has ended") from error
        return copy

    def drop(self) -> int | None:
        """Kill the process and all that it started; it may start again. Return its exit status."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._process is None:
            return None
        end_guarded(self._process)
        return self._process.returncode

    def end(self) -> None:
        """Kill the process and all that it started, for good; another thread's call then fails."""
        with self._lock:
            self._is_ended = True
        if self._process is not None:
            end_guarded(self._process)

    def close(self) -> None:
        """Leave nothing behind. Twice is a no-op. No other thread may be in a call."""
        self.end()
        self.drop()

    def _open(self) -> Channel:
        parent_end, child_end = socket.socketpair()
        search_path = to_json_text([entry for entry in sys.path if isinstance(entry, str)])
        # -P: the working folder must not hide modules of the standard library.
        command = [sys.executable, "-P", "-c", _PROGRAM, search_path, str(child_end.fileno())]
        with child_end, self._lock:
            if self._is_ended:
                parent_end.close()
                raise CallFailed("its process was ended with the run")
            self._process = subprocess.Popen(
                guarded(command),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        return Channel(parent_end)

    def _end_copy(self, number: int) -> None:
        with suppress(OSError):  # the process has ended, and so have its copies
            if self._channel is not None:
                self._channel.order({"end": number})


class Copy:
    """A copy of a child, with calls and a state of its own; end it."""

    def __init__(self, channel: Channel, end: Callable[[], None], timeout_s: float) -> None:
        self._channel = channel
        self._end = end
        self._timeout_s = timeout_s

    async def call(self, message: Mapping[str, object], *, max_bytes: int) -> Message:
        """Return the answer to a call; raises as ``Child.call``."""
        with _failures(self.end, self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                return await self._channel.ask(message, max_bytes=max_bytes)

    def end(self) -> None:
        """Kill it. Twice is a no-op."""
        self._channel.close()
        self._end()


C = TypeVar("C", bound=Child)


class Pool(Generic[C]):
    """Several children of a kind, each with a thread that waits for it; close it."""

    def __init__(self, children: Sequence[C], *, name: str) -> None:
        """Start nothing yet. ``name`` is that of the threads."""
        self.children = children
        self._threads = ThreadPoolExecutor(len(children), thread_name_prefix=name)
        self._idle: queue.LifoQueue[C] = queue.LifoQueue()
        for child in reversed(children):
            self._idle.put(child)

    def start(self) -> list[Future[None]]:
        """Begin to start all children, at a time. One that has started takes calls."""
        return [self._threads.submit(self._start, self._idle.get()) for _ in self.children]

    def run(self, call: Callable[[C], T]) -> T:
        """Call with the next child that is idle."""
        child = self._idle.get()
        try:
            return call(child)
        finally:
            self._idle.put(child)

    def submit(self, call: Callable[[C], T]) -> Future[T]:
        """Run ``call`` in a thread."""
        return self._threads.submit(self.run, call)

    def close(self) -> None:
        """End all children; calls under way fail. Twice is a no-op."""
        for child in self.children:
            child.end()
        self._threads.shutdown(cancel_futures=True)
        for child in self.children:
            child.close()

    def _start(self, child: C) -> None:
        try:
            child.start()
        finally:
            self._idle.put(child)


@contextmanager
def _failures(end: Callable[[], int | None], timeout_s: float) -> Iterator[None]:
    """Turn errors of a channel into CallFailed; after all but an answer, end the process."""
    try:
        yield
    except TimeoutError as error:
        end()
        raise CallHung(f"{str(error) or 'took longer than'} {timeout_s:g} s") from error
    except Garbage as error:
        end()
        raise CallFailed(f"{error}; its process was ended") from error
    except ChannelClosed as error:
        status = end()
        kind = CallKilled if status in _KILLED else CallFailed
        raise kind(_describe_end(status)) from error


def _describe_end(status: int | None) -> str:
    if status is None:
        return "ended its process"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended its process, exit code {status}"
