"""The rollout engines of a node: their addresses and loads, as each of its ranks sees them.

Engines listen on their own machine alone, so ranks share those of their node.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CELL_BYTES = 8
_TOKEN_BITS = 62


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server of an engine listens, and who gets in."""

    host: str = "127.0.0.1"
    """Address of this machine: loopback, or that in the cluster."""

    key: str = field(default="", repr=False)
    """That callers must send; empty: the server makes its own."""


@dataclass(frozen=True, slots=True)
class RowAddress:
    """The memory of a ``LoadRow``, for other processes of the machine."""

    file: str
    """Open file of the process that writes the row; it is gone when that process is."""

    token: int
    """In the row's first cell: another machine may have another file by this name."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How the ranks of a node reach an engine."""

    url: str
    key: str = field(repr=False)
    pid: int
    """Of a process that ends with the engine."""

    row: RowAddress
    """Of the rank that owns the engine."""


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """An engine of another rank on this node."""

    index: int
    """Among the engines of the worker group."""

    address: EngineAddress
    row: memoryview


class LoadRow:
    """How many responses one rank has open at each engine, in memory that its machine shares.

    Only this rank writes, and others read without a lock. The memory goes with the process.
    """

    def __init__(self, num_engines: int) -> None:
        descriptor = os.memfd_create("hybridrl-open-responses")
        num_bytes = _CELL_BYTES * (1 + num_engines)
        os.ftruncate(descriptor, num_bytes)
        self.cells = memoryview(mmap.mmap(descriptor, num_bytes)).cast("q")
        self.cells[0] = secrets.randbits(_TOKEN_BITS)
        self.address = RowAddress(f"/proc/{os.getpid()}/fd/{descriptor}", self.cells[0])


def open_row(address: RowAddress) -> memoryview | None:
    """Map the row of another rank; None if that rank is on another machine."""
    try:
        with Path(address.file).open("rb") as file:
            cells = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")
    except (OSError, ValueError, TypeError):  # no such file, an empty one, or another's
        return None
    return cells if cells[0] == address.token else None


class EngineDirectory:
    """The engines of a worker group, on one rank of it. Ranks exchange what they announce."""

    def __init__(self, num_engines: int, *, door: Door | None = None) -> None:
        """Know no engine yet.

        Args:
            door: of this rank's engine; None: loopback, with a key of its own.
        """
        self.door = door or Door()
        self.has_news = False
        """Whether the other ranks lack the address of this rank's engine."""
        self.own: EngineAddress | None = None
        """Address of this rank's engine; None on a rank without one."""
        self.own_index = 0
        self.others: tuple[KnownEngine, ...] = ()
        """Engines of other ranks on this node."""
        self._row = LoadRow(num_engines)

    def announce(self, url: str, *, key: str, pid: int) -> None:
        """An engine of this rank has started.

        Args:
            key: that the server requires.
            pid: of a process that ends with it.
        """
        self.own = EngineAddress(url, key, pid, self._row.address)
        self.has_news = True

    def learn(self, announced: Sequence[EngineAddress | None]) -> None:
        """Take over what all ranks announced, in rank order."""
        addresses = [address for address in announced if address is not None]
        others = []
        for index, address in enumerate(addresses):
            if address == self.own:
                self.own_index = index
            elif (row := open_row(address.row)) is not None:
                others.append(KnownEngine(index, address, row))
        self.others = tuple(others)
        self.has_news = False

    def clear(self) -> None:
        """This rank has no response open."""
        for cell in range(1, len(self._row.cells)):
            self._row.cells[cell] = 0

    def count(self, engine: int, num_responses: int) -> None:
        """This rank opened responses at an engine; closed, if negative."""
        self._row.cells[1 + engine] += num_responses

    def load(self, engine: int) -> int:
        """Return how many responses the ranks of this node have open at an engine."""
        rows = (self._row.cells, *(other.row for other in self.others))
        return sum(row[1 + engine] for row in rows)
