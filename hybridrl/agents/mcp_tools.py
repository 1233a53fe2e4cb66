"""Tools of servers of the Model Context Protocol: ``mcp:COMMAND``, a server on stdin and stdout.

Imported in children alone, which start the server and end it with them: the SDK takes 2 s.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from typing import Any

from mcp import ClientSession, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams

from hybridrl import env
from hybridrl.agents.tool_process import Content, to_content, to_text
from hybridrl.config.agent import MCP
from hybridrl.processes.child import Declined, Emit, Message, Service

_MAX_PAGES = 100


def load(spelled: str) -> tuple[Service, list[dict[str, Any]]]:
    """List the tools of a server; the service, see ``processes/child.py``, is never called."""

    def call(message: Message, emit: Emit) -> None:
        raise Declined("the tools are listed alone")

    return call, Connection(spelled).schemas()


class Connection:
    """A running server; it ends with this process."""

    def __init__(self, spelled: str) -> None:
        """Start it and shake hands; raises any error of the SDK."""
        command, *arguments = shlex.split(spelled.removeprefix(MCP))
        server = StdioServerParameters(command=command, args=arguments, env=env.everything())
        self._loop = asyncio.new_event_loop()

        async def connect() -> None:
            # Left open: their end is that of the process, and the server's with it.
            self._transport = stdio_client(server)
            self._session = ClientSession(*await self._transport.__aenter__())
            await self._session.__aenter__()
            await self._session.initialize()

        self._loop.run_until_complete(connect())

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of its tools."""

        async def list_pages() -> list[dict[str, Any]]:
            schemas, cursor = [], None
            for _ in range(_MAX_PAGES):
                page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                schemas += [_to_schema(tool) for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    break
            return schemas

        return self._loop.run_until_complete(list_pages())

    def call(self, name: str, arguments: Mapping[str, object], max_chars: int) -> Content:
        """Return the result of a tool; Declined with the error that the tool returned."""
        try:
            result: Any = self._loop.run_until_complete(
                self._session.call_tool(name, dict(arguments))
            )
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                os._exit(1)  # the next call gets another process, with another server
            raise Declined(to_text(f"{name}: {error}", max_chars=max_chars)) from error
        blocks = [block.model_dump(mode="json", by_alias=True) for block in result.content]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        if result.is_error:
            raise Declined(to_text("\n".join(texts), max_chars=max_chars))
        is_text = len(texts) == len(blocks)
        value = "\n".join(texts) if is_text else [_to_part(b, max_chars) for b in blocks]
        return to_content(value, max_chars=max_chars)


def _to_schema(tool: Any) -> dict[str, Any]:  # noqa: ANN401 - of the SDK
    given = tool.input_schema
    properties = given.get("properties", {}).items()  # of each a schema, or whether it is allowed
    known = {name: entry if isinstance(entry, dict) else {} for name, entry in properties}
    parameters = {**given, "type": "object", "properties": known}
    description = tool.description or tool.title or tool.name
    function = {"name": tool.name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _to_part(block: dict[str, Any], max_chars: int) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "image":
        return {"type": "image", "image": f"data:{block['mimeType']};base64,{block['data']}"}
    return {"type": "text", "text": to_text(block, max_chars=max_chars)}
