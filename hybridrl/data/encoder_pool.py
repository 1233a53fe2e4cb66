"""Encodes rows by several processes; the order of the result is that of the rows."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from hybridrl import env
from hybridrl.data.encoding import EncodedRows, RowEncoder
from hybridrl.data.parsing import RawRow
from hybridrl.data.rows import Row
from hybridrl.diagnostics.processes import end_guarded, guarded
from hybridrl.errors import DataError, HybridRLError

_CHILD = "hybridrl.data.encoder_child"
_CHUNKS_PER_PROCESS = 4  # so that none waits for this process


class _Child:
    """One process. It has a session of its own, so Ctrl-C does not reach it; see `guard`."""

    def __init__(self) -> None:
        self._connection, other_end = Pipe()
        with other_end:
            self._process = subprocess.Popen(
                guarded([sys.executable, "-m", _CHILD, str(other_end.fileno())]),
                pass_fds=[other_end.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=env.everything()
                | {"PYTHONPATH": env.python_path(), "TOKENIZERS_PARALLELISM": "false"},
            )

    def call(self, message: RowEncoder | Sequence[RawRow | Row]) -> EncodedRows | None:
        try:
            self._connection.send(message)
            answer: EncodedRows | HybridRLError | None = self._connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a process that tokenizes rows has ended, perhaps for want of memory; set "
                "data.num_processes=1, or fewer than now"
            ) from error
        if isinstance(answer, HybridRLError):
            raise answer
        return answer

    def end(self) -> None:
        end_guarded(self._process)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()


class EncoderPool:
    """Holds processes; use it in a ``with``."""

    def __init__(self, encoder: RowEncoder, *, num_processes: int) -> None:
        """Start processes; they take seconds to begin, and nobody waits for that.

        Args:
            encoder: its tokenizer is a fast one, which can be sent to a process.
            num_processes: at least one.
        """
        self._encoder = encoder
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="tokenize")
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._children: list[_Child] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for _ in range(num_processes):
                self._children.append(_Child())
            on_error.pop_all()
        self._starts = [self._threads.submit(self._start, child) for child in self._children]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def has_begun(self) -> bool:
        """Whether a process is ready."""
        return any(start.done() for start in self._starts)

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.end()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def map(self, chunks: Iterable[Sequence[RawRow | Row]]) -> Iterator[EncodedRows]:
        """Encode chunks, in order; this process does it until another one has begun.

        Raises:
            DataError: a chunk cannot be encoded, or a process has ended.
        """
        running: deque[Future[EncodedRows]] = deque()
        for chunk in chunks:
            if not self.has_begun and not running:
                yield self._encoder(chunk)
                continue
            running.append(self._threads.submit(self._call, chunk))
            if len(running) == _CHUNKS_PER_PROCESS * len(self._children):
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _start(self, child: _Child) -> None:
        try:
            child.call(self._encoder)
        finally:
            self._idle.put(child)  # one that has ended fails at the first call

    def _call(self, chunk: Sequence[RawRow | Row]) -> EncodedRows:
        child = self._idle.get()
        try:
            encoded = child.call(chunk)
        finally:
            self._idle.put(child)
        if encoded is None:
            raise DataError("a process that tokenizes rows gave no answer; start the run again")
        return encoded
