from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.agents.tool_calls import BrokenCall, ToolCall
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, ToolResult, load_tools
from hybridrl.errors import AgentError

FILE = Path(__file__).with_name("tools_file.py")
LIMITS = ToolLimits(timeout_s=5.0, max_chars=200)


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    names = [
        f"{FILE}:{name}"
        for name in ("double", "misbehave", "wait_for", "explode", "leave", "disconnect", "shout")
    ]
    box = Toolbox(load_tools([*names, "calculator"]), limits=LIMITS, num_processes=2)
    yield box
    box.close()


def _call(toolbox: Toolbox, name: str, **arguments: object) -> ToolResult:
    return asyncio.run(toolbox.call(ToolCall(name, arguments)))


def test_a_schema_follows_from_hints_and_docstring() -> None:
    (tool,) = load_tools([f"{FILE}:double"])
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Double a number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "number": {"type": "integer", "description": "The number"},
                    "times": {"type": "integer", "description": "How often"},
                },
                "required": ["number"],
            },
        },
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"{FILE}:paint"], "an argument colour of .*Colour.*, which JSON cannot hold"),
        ([f"{FILE}:sum_all"], r"takes \*numbers; list its arguments by name"),
        ([f"{FILE}:undocumented"], "has no schema: .* docstring"),
        ([f"{FILE}:nothing"], "no function 'nothing'"),
        (["calculater"], "calculator"),
        (["/no/such/file.py:f"], "cannot be loaded: FileNotFoundError"),
        ([f"{FILE}:double"] * 2, "two tools 'double'"),
    ],
)
def test_a_function_that_is_no_tool_or_comes_twice_is_refused(
    names: list[str], message: str
) -> None:
    with pytest.raises(AgentError, match=message):
        load_tools(names)


async def test_tools_run_side_by_side_in_processes(toolbox: Toolbox) -> None:
    calls = [ToolCall("double", {"number": n}) for n in range(5)]
    results = await asyncio.gather(*map(toolbox.call, calls))
    assert [result.text for result in results] == ["0", "2", "4", "6", "8"]
    assert not any(result.is_error for result in results)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("doubel", {}), "there is no tool 'doubel'; the tools are: double, misbehave"),
        (ToolCall("double", {}), "double needs the argument 'number'; it takes number, times"),
        (ToolCall("double", {"x": 1}), "double has no argument 'x'; it takes number, times"),
        (ToolCall("double", {"number": True}), "takes number of type integer, not bool"),
        (ToolCall("misbehave", {"how": "sing"}), "takes for how one of ['hang', 'raise'"),
        (ToolCall("misbehave", {"how": b"x"}), "takes how of type string, not bytes"),
        (ToolCall("misbehave", {"how": "raise"}), "raised ValueError: no such city: ? (tools_file"),
        (ToolCall("misbehave", {"how": "object"}), "cannot be written as JSON"),
        (ToolCall("misbehave", {"how": "die"}), "ended its process, exit code 3"),
        (ToolCall("explode", {}), "explode raised RuntimeError: boom (tools_file.py:"),
        (ToolCall("leave", {}), "leave raised SystemExit: 1 (tools_file.py:"),
        (ToolCall("disconnect", {}), "disconnect raised CancelledError: the connection closed"),
        (ToolCall("calculator", {"expression": "1/0"}), "division by zero"),
        (ToolCall("calculator", {"expression": "9**999**9"}), "exponent"),
        (ToolCall("calculator", {"expression": "open('x')"}), "open('x') is not arithmetic"),
        (ToolCall("calculator", {"expression": "(" * 10**4}), "Error: "),
        (BrokenCall("write [f()]"), "Error: write [f()]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_is_told_to_the_model(
    toolbox: Toolbox, call: ToolCall | BrokenCall, text: str
) -> None:
    result = asyncio.run(toolbox.call(call))
    assert text in result.text
    assert result.is_error
    assert _call(toolbox, "double", number=4).text == "8"


def test_a_result_is_bounded_and_can_be_encoded(toolbox: Toolbox) -> None:
    flood = _call(toolbox, "misbehave", how="flood")
    assert "(999999800 characters left out)" in flood.text
    assert len(flood.text) < 250
    assert _call(toolbox, "misbehave", how="unencodable").text == "?é"
    assert _call(toolbox, "shout").text == "done"


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("misbehave", {"how": "hang"}),
        ToolCall("wait_for", {"seconds": 1000}),
        ToolCall("persist", {}),
    ],
    ids=["in a process", "asynchronous", "not to be cancelled"],
)
@pytest.mark.timeout(30)
def test_a_tool_that_never_returns_is_given_up(call: ToolCall) -> None:
    tools = load_tools([f"{FILE}:{name}" for name in ("misbehave", "wait_for", "persist")])
    limits = ToolLimits(timeout_s=0.5, max_chars=100)
    toolbox = Toolbox(tools, limits=limits, num_processes=1)
    result = asyncio.run(toolbox.call(call))
    toolbox.close()
    assert result.is_error
    assert result.text.endswith("took longer than 0.5 s")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*(3+4)", "84"), ("7/2", "3.5"), ("6/3", "2"), ("-2**2", "-4"), ("0.1+0.2", "0.3")],
)
def test_the_calculator_computes(toolbox: Toolbox, expression: str, value: str) -> None:
    assert _call(toolbox, "calculator", expression=expression).text == value
