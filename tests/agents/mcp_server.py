"""A server of tools, as ``mcp:python mcp_server.py [KIND]``: it may die, hang or write garbage."""

from __future__ import annotations

import os
import sys
import time
from base64 import b64encode
from io import BytesIO

from mcp.server import MCPServer
from mcp.types import ImageContent, TextContent
from PIL import Image

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def repeat(text: str, times: int) -> str:
    """Say a text several times."""
    return text * times


@server.tool()
def calculator(expression: str) -> str:
    """Compute the sum of two numbers, such as ``0+7``."""
    return str(sum(map(int, expression.split("+"))))


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no luck")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


@server.tool()
def garble() -> str:
    """Write what is no message, and then answer."""
    os.write(1, b"{ no message\n\xff\xfe\n")
    return "all the same"


@server.tool()
def draw() -> list[TextContent | ImageContent]:
    """Show an image."""
    file = BytesIO()
    Image.new("RGB", (30, 30), "white").save(file, "PNG")
    data = b64encode(file.getvalue()).decode()
    image = ImageContent(type="image", data=data, mime_type="image/png")
    return [TextContent(type="text", text="a dot"), image]


if __name__ == "__main__":
    if sys.argv[1:] == ["garbage"]:
        os.write(1, b"hello\n" * 1000)
        sys.exit(1)
    server.run()
