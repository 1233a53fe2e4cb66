from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from hybridrl.agents.tool_calls import ToolCall
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Tool, Toolbox, load_tools
from hybridrl.data.rows import IMAGE_MARK
from hybridrl.errors import AgentError
from tests.agents.test_images import SETTINGS

pytest.importorskip("mcp", reason="the extra mcp is not installed")

OWN = Path(__file__).with_name("tools_file.py")
SERVER = f"mcp:{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


@pytest.fixture(scope="module")
def listed() -> tuple[Sequence[Tool], Sequence[list[str]]]:
    """Tools, and commands of servers that still ran when they were listed."""
    mark = f"left_by_{os.getpid()}"
    tools = load_tools([f"{SERVER} {mark}", f"{OWN}:double"])
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return tools, [command for command in commands if mark in command]


@pytest.fixture(scope="module")
def toolbox(listed: tuple[Sequence[Tool], Sequence[list[str]]]) -> Iterator[Toolbox]:
    limits = ToolLimits(timeout_s=8.0, max_chars=200, images=SETTINGS)
    box = Toolbox(listed[0], limits=limits, num_processes=1)
    yield box
    box.close()


async def text_of(box: Toolbox, name: str, **arguments: object) -> str:
    result = await box.call(ToolCall(name, arguments))
    assert result.is_error == result.text.startswith("Error: ")
    return result.text


def test_the_tools_of_a_server_are_listed_with_their_schemas_and_none_is_left_behind(
    listed: tuple[Sequence[Tool], Sequence[list[str]]],
) -> None:
    tools, left = listed
    assert left == []
    assert [tool.name for tool in tools][:2] == ["add", "repeat"]
    assert tools[0].schema["function"]["description"] == "Add two numbers."
    assert tools[0].parameters["required"] == ["a", "b"]
    assert tools[0].parameters["properties"]["a"]["type"] == "integer"


async def test_calls_are_answered_within_limits(toolbox: Toolbox) -> None:
    assert await text_of(toolbox, "add", a=2, b=3) == "5"
    assert await text_of(toolbox, "double", number=3) == "6"
    long = await text_of(toolbox, "repeat", text="x", times=1_000_000)
    assert "999800 characters left out" in long
    assert await text_of(toolbox, "add", a=2) == (
        "Error: add needs the argument 'b'; it takes a, b"
    )
    assert await text_of(toolbox, "fail") == "Error: Error executing tool fail"


@pytest.mark.parametrize(
    ("name", "text"), [("die", "ended its process"), ("hang", "8 s"), ("garble", "all the same")]
)
async def test_a_server_that_dies_or_hangs_costs_its_call_and_garbage_is_skipped(
    toolbox: Toolbox, name: str, text: str
) -> None:
    assert text in await text_of(toolbox, name)
    assert await text_of(toolbox, "add", a=2, b=3) == "5"


def test_a_server_that_does_not_begin_is_refused() -> None:
    with pytest.raises(AgentError, match=r"cannot be loaded: .*; correct the command"):
        load_tools([f"{SERVER} garbage"])


@pytest.mark.usefixtures("ray_cluster")
async def test_a_server_shows_images(toolbox: Toolbox) -> None:
    result = await toolbox.call(ToolCall("draw", {}))
    assert (result.is_error, len(result.images)) == (False, 1)
    assert result.text == f"a dot{IMAGE_MARK}"
