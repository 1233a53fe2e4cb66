"""Environments whose methods are plain functions: each plays in a process of its own.

One that hangs, dies, forks or floods costs its own conversation. Calls are awaited, so that the
event loop of the rank is not blocked.
"""

from __future__ import annotations

import asyncio
import json
import socket
from itertools import count
from pathlib import Path
from typing import Any

from hybridrl.agents.environment_child import PACKET_BYTES, encode_packet
from hybridrl.agents.observations import Observed
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.data.rows import Row, write_record
from hybridrl.errors import AgentError
from hybridrl.processes.guarded import end_guarded, start_guarded_module
from hybridrl.rewards.child import HEADER, encode

_CHILD = "hybridrl.agents.environment_child"
_LOAD_TIMEOUT_S = 60.0
_SEND_TIMEOUT_S = 10.0
_ANSWER_BYTES = 1 << 16
_BYTES_PER_CHAR, _USUAL_MESSAGES = 12, 8  # of a character that JSON writes as two escapes


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered in another form: its conversation ends."""


class EnvironmentServer:
    """The process that forks environments of one kind; close it at the end."""

    def __init__(self, path: Path, name: str, *, limits: ToolLimits) -> None:
        """Start the process and load the file.

        Raises:
            AgentError: the file cannot be loaded within 60 s.
        """
        self.limits = limits
        self._load = {"path": str(path), "name": name, "max_chars": limits.max_chars}
        self._numbers = count()
        self._start()

    def begin(self) -> ProcessEnvironment:
        """Start an environment.

        Raises:
            AgentError: the process had to be started again, and that failed.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        number = next(self._numbers)
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(0.0)
        with child_end:
            packet = encode_packet({"begin": number})
            socket.send_fds(self._control, [packet], [child_end.fileno()])
        return ProcessEnvironment(self, number, parent_end)

    def end(self, number: int) -> None:
        """Kill an environment."""
        try:
            self._control.send(encode_packet({"end": number}))
        except OSError:  # the process has ended, and so have its environments
            return

    def close(self) -> None:
        """Kill the process and all environments. Twice is a no-op."""
        self._control.close()
        end_guarded(self._process)

    def _start(self) -> None:
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._process = start_guarded_module(_CHILD, child_end.fileno())
        self._control.settimeout(_LOAD_TIMEOUT_S)
        reason = ""
        try:
            self._control.send(encode_packet(self._load))
            answer = json.loads(self._control.recv(PACKET_BYTES) or b"{}")
            reason = answer.get("failed", "" if "text" in answer else "its process ended")
        except OSError as error:
            reason = f"no answer within {_LOAD_TIMEOUT_S:g} s: {error}"
        if reason:
            self.close()
            path, name = self._load["path"], self._load["name"]
            raise AgentError(
                f"agent.environment={path}:{name} cannot be loaded: {reason}; correct the file"
            )
        self._control.settimeout(_SEND_TIMEOUT_S)


class ProcessEnvironment:
    """One environment in its process."""

    def __init__(self, server: EnvironmentServer, number: int, connection: socket.socket) -> None:
        self._server = server
        self._number = number
        self._connection = connection

    async def reset(self, row: Row, seed: int) -> Observed:
        """Begin; see ``PlayedEnvironment``, and ``observations.Environment``."""
        return await self._call({"reset": [write_record(row).decode(), seed]})

    async def step(self, action: str) -> Observed:
        """Answer a turn; raises as ``reset``."""
        return await self._call({"step": action})

    async def close(self) -> None:
        """Let it close what it opened, and kill it."""
        try:
            await self._call({"close": True})
        except EnvironmentFailed:
            return
        finally:
            self._connection.close()
            self._server.end(self._number)

    async def _call(self, message: dict[str, Any]) -> Observed:
        limits = self._server.limits
        try:
            async with asyncio.timeout(limits.timeout_s):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._connection, encode(message))
                answer = json.loads(await self._read(*HEADER.unpack(await self._read(HEADER.size))))
        except TimeoutError as error:
            raise EnvironmentFailed(f"took longer than {limits.timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise EnvironmentFailed("ended its process, or sent something else") from error
        if not isinstance(answer, dict) or "observed" not in answer:
            raise EnvironmentFailed(f"raised {answer.get('failed') if answer else answer}")
        try:
            return Observed.from_json(answer["observed"])
        except (TypeError, KeyError) as error:
            raise EnvironmentFailed("sent something else") from error

    async def _read(self, size: int) -> bytes:
        limit = _ANSWER_BYTES + _USUAL_MESSAGES * _BYTES_PER_CHAR * self._server.limits.max_chars
        if size > limit:
            raise ValueError(f"an answer of {size} bytes, more than {limit}")
        data = bytearray()
        while len(data) < size:
            loop = asyncio.get_running_loop()
            received = await loop.sock_recv(self._connection, min(size - len(data), 1 << 20))
            if not received:
                raise ConnectionResetError
            data += received
        return bytes(data)
