"""An environment on a server of OpenEnv (0.3), in that project's protocol: JSON over a WebSocket.

Imported by name on request: aiohttp takes 0.3 s.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, suppress
from typing import Any, cast

from aiohttp import ClientSession, ClientWSTimeout, WSMsgType

from hybridrl.agents.chat import Fields
from hybridrl.data.rows import Row
from hybridrl.errors import AgentError, shown
from hybridrl.json_text import to_json_text

_MESSAGE_BYTES = 1 << 24
_CLOSE_TIMEOUT_S = 1.0


class InvalidAction(ValueError):
    """A turn is no action of the environment: the model reads why, and gets no reward for it."""


class OpenEnv:
    """Plays on the server at ``url``, in a session of its own.

    A subclass may say otherwise how it is reset, which action a turn is, and what the model reads.
    """

    url = ""
    """Without the path: ``http://host:port``."""

    def __init__(self, url: str = "") -> None:
        """Connect to nothing yet; without ``url`` the class has one."""
        self.url = (url or self.url).rstrip("/")
        self.schema: Fields = {}
        """JSON schema of an action."""
        self._opened = AsyncExitStack()

    def arguments(self, row: Row, seed: int) -> Fields:
        """Return the arguments of the environment's ``reset``."""
        return {"seed": seed}

    def action(self, text: str) -> Fields:
        """Return the action of a turn: an object in JSON, or else the text of its one needed field.

        InvalidAction: it is neither.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if isinstance(value, dict):
            return value
        needed, fields = self.schema.get("required", []), self.schema.get("properties", {})
        if len(needed) != 1:
            names = sorted(fields.keys() - {"metadata"})
            raise InvalidAction(f"Error: write an object in JSON with {', '.join(names)}")
        (name,) = needed
        return {name: text if fields[name].get("type") == "string" else value}

    def show(self, observation: Fields) -> object:
        """Return the text (or parts) that the model reads: the only field if it is a text, or JSON.

        Metadata are for others: servers of 0.3 do not send it, those of 0.10 do.
        """
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        values = list(fields.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return to_json_text(fields, keeps_unicode=True)

    async def ask(self, kind: str, data: Fields | None = None) -> Fields:
        """Send a message, ``reset``, ``step`` or ``state``; return the data of its answer.

        InvalidAction: the environment has no such action. AgentError: another answer, or none.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        with suppress(ConnectionError):  # a server that is full has said so and hung up
            await self._socket.send_str(to_json_text(message))
        received = await self._socket.receive()
        answer: Any = received.data if received.type is WSMsgType.TEXT else received.type.name
        with suppress(ValueError, RecursionError):
            answer = json.loads(answer)
        match answer:
            case {"type": "observation", "data": {"observation": {}, "done": bool()} as fields}:
                return cast("Fields", fields)
            case {"type": "state", "data": {} as fields}:
                return cast("Fields", fields)
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [*errors]}}:
                wrong = [f"{_path_of(each)}: {each.get('msg')}" for each in errors]
                raise InvalidAction(f"Error: {'; '.join(wrong)}")
        raise AgentError(
            f"the OpenEnv server at {self.url} answered {kind} with {shown(answer)}; its log says "
            "more, and agent.num_conversations limits the sessions of a rank"
        )

    async def reset(self, row: Row, seed: int) -> object:
        """Begin a session."""
        open_in = self._opened.enter_async_context
        session = await open_in(ClientSession(raise_for_status=True))
        async with session.get(f"{self.url}/schema") as answer:
            self.schema = (await answer.json())["action"]
        timeout = ClientWSTimeout(ws_close=_CLOSE_TIMEOUT_S)
        connecting = session.ws_connect(
            f"{self.url}/ws", max_msg_size=_MESSAGE_BYTES, timeout=timeout
        )
        self._socket = await open_in(connecting)
        begun = await self.ask("reset", self.arguments(row, seed))
        return self.show(begun["observation"])

    async def step(self, action: str) -> tuple[object, float, bool]:
        """Answer a turn."""
        try:
            answer = await self.ask("step", self.action(action))
        except InvalidAction as error:
            return str(error), 0.0, False
        reward = answer.get("reward")
        shown_part = self.show(answer["observation"])
        return shown_part, 0.0 if reward is None else reward, answer["done"]

    async def close(self) -> None:
        """End the session."""
        await self._opened.aclose()


def _path_of(error: Fields) -> str:
    return ".".join(map(str, error.get("loc", ())))
