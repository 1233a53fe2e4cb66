"""Tools: Python functions whose schema follows from their hints and docstring.

Nothing that a tool does ends the run. Errors, deadlines and unknown names are results that the
model reads.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers.utils import get_json_schema

from hybridrl.agents import built_in
from hybridrl.agents.built_in import SearchIndex
from hybridrl.agents.tool_calls import BrokenCall, ToolCall
from hybridrl.agents.tool_process import (
    MCP_TOOLS,
    Content,
    ToolFailed,
    ToolLimits,
    ToolProcess,
    to_content,
    to_text,
)
from hybridrl.config.agent import BUILT_IN_TOOLS, MCP, SEARCH
from hybridrl.data.images import look_at
from hybridrl.data.rows import Malformed, Message, RawMessage
from hybridrl.errors import AgentError, SandboxError, suggest_name
from hybridrl.images import Images
from hybridrl.json_text import to_json_text
from hybridrl.loop_thread import LoopThread, is_cancelled
from hybridrl.processes.child import last_line, load_function
from hybridrl.processes.pool import Child, LoadFailed, Pool
from hybridrl.processes.sandbox import require_sandbox

Schema = Mapping[str, Any]

_LIST_TIMEOUT_S = 60.0
_JSON_TYPES: frozenset[object] = frozenset(
    (int, float, bool, str, list, dict, tuple, type(None), Any, Ellipsis)
)
_OF_JSON_TYPE: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "string": (str,),
    "array": (list, tuple),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    spelled: str
    """As in ``agent.tools``."""

    file: str
    """With its function; for a tool of an MCP server ``mcp:COMMAND``, as it is spelled."""

    function: Callable[..., Any] | None
    """None if an MCP server has it."""

    schema: Schema
    """As chat templates take it."""

    @property
    def name(self) -> str:
        """Return the name by which a model calls it."""
        name: str = self.schema["function"]["name"]
        return name

    @property
    def parameters(self) -> Schema:
        """Return the schema of its arguments."""
        parameters: Schema = self.schema["function"]["parameters"]
        return parameters


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that a model gets as answer to a call."""

    text: str
    is_error: bool
    seconds: float
    images: Images = ()
    """Of the marks in the text."""

    name: str = ""
    """Of the tool, and the number of the call, for templates that show them."""
    call_id: str = ""

    @property
    def message(self) -> Message:
        """Return it as a message."""
        return Message("tool", self.text, self.images, self.name, self.call_id)


def load_tools(spelled_names: Sequence[str], sandbox: str = "namespaces") -> tuple[Tool, ...]:
    """Import tools and derive their schemas; AgentError names the tool, and what it lacks.

    ``sandbox`` is that of the tool ``python``; SandboxError: its programs cannot run there.
    """
    tools: list[Tool] = []
    for spelled in spelled_names:
        if spelled.startswith(MCP):
            tools += [Tool(spelled, spelled, None, schema) for schema in _schemas_of(spelled)]
            continue
        tool = _load_tool(spelled)
        if spelled == "python":
            require_sandbox(sandbox)
            tool = replace(tool, function=partial(built_in.python_in, sandbox))
        tools.append(tool)
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise AgentError(f"agent.tools has two tools {twice[0]!r}; rename one of the functions")
    return tuple(tools)


def _schemas_of(spelled: str) -> list[Schema]:
    """Start an MCP server and list its tools; AgentError if it fails."""
    name = f"agent.tools={spelled}"
    child = Child(
        MCP_TOOLS, {"spelled": spelled}, names=[name], timeout_s=_LIST_TIMEOUT_S, is_silent=True
    )
    try:
        child.start()
    except LoadFailed as failure:
        raise AgentError(
            f"{failure}; correct the command, or pip install 'hybridrl[mcp]' if mcp is missing"
        ) from failure
    finally:
        child.close()
    schemas: list[Schema] = child.loaded
    if not schemas:
        raise AgentError(f"{name} has no tools")
    return schemas


def with_index(tools: Sequence[Tool], folder: str | None) -> tuple[Tool, ...]:
    """Give the tool ``search`` an index of the folder, if it is among the tools."""
    return tuple(
        replace(tool, function=SearchIndex(Path(str(folder))).search)
        if tool.spelled == SEARCH
        else tool
        for tool in tools
    )


def _load_tool(spelled: str) -> Tool:
    file, _, name = spelled.rpartition(":")
    if not file:
        if name not in BUILT_IN_TOOLS:
            raise AgentError(
                f"agent.tools={spelled!r} is not built in; {suggest_name(name, BUILT_IN_TOOLS)} "
                "For your own set agent.tools=[path/to/file.py:function]"
            )
        if name == SEARCH:
            method = SearchIndex.search  # of the index that a rank makes: see `with_index`
            return Tool(spelled, built_in.__file__, method, schema_of(method, spelled=name))
        file = str(built_in.__file__)
    try:
        function = load_function(file, name)
    except (Exception, SystemExit) as error:  # any user code
        raise AgentError(
            f"agent.tools={spelled} cannot be loaded: {last_line(error)}; correct the file"
        ) from error
    return Tool(spelled, file, function, schema_of(function, spelled=spelled))


def schema_of(function: Callable[..., Any], *, spelled: str) -> Schema:
    """Derive the schema from hints and docstring, without a return value.

    AgentError: a hint or text is missing, or an argument has no form in JSON, for which
    transformers would silently write a wrong schema.
    """
    where = f"agent.tools={spelled}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise AgentError(f"{where} takes *{parameter.name}; list its arguments by name")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise AgentError(f"{where} takes {parameter.name} by position; remove the /")
    try:
        hints = get_type_hints(function)
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # of several kinds, and of the function's own module
        raise AgentError(
            f"{where} has no schema: {error}; give each argument a hint, and a line "
            "`name: text` below `Args:` in the docstring"
        ) from error
    for name, hint in hints.items():
        if name != "return" and not _has_json_form(hint):
            raise AgentError(
                f"{where} has an argument {name} of {hint}, which JSON cannot hold; use int, "
                "float, bool, str, list, dict or Literal"
            )
    schema["function"].pop("return", None)
    return schema


def _has_json_form(hint: object) -> bool:
    if get_origin(hint) is Literal:
        return True
    if get_origin(hint) in (Union, types.UnionType, list, dict, tuple):
        return all(map(_has_json_form, get_args(hint)))
    return hint in _JSON_TYPES


class Toolbox:
    """Calls the tools of a rank; close it at the end.

    Built-in tools run in the caller's event loop. Asynchronous ones of users run in a thread, where
    one that cannot be cancelled continues; others in processes, which are killed at their deadline.
    """

    def __init__(self, tools: Sequence[Tool], *, limits: ToolLimits, num_processes: int) -> None:
        """Take tools from ``load_tools``. Processes start when they are needed."""
        self._tools = {tool.name: tool for tool in tools}
        self._limits = limits
        in_processes = [t for t in tools if not inspect.iscoroutinefunction(t.function)]
        self._numbers = {tool.name: number for number, tool in enumerate(in_processes)}
        functions = [(tool.file, tool.name) for tool in in_processes]
        processes = [ToolProcess(functions, limits) for _ in range(num_processes)]
        self._processes = Pool(processes, name="tool")
        self._loop = LoopThread("asynchronous tools")

    async def call(self, call: ToolCall | BrokenCall) -> ToolResult:
        """Call a tool; a failure is a result, too. AgentError: its file no longer loads."""
        begin, images = time.perf_counter(), Images()
        tool = None if isinstance(call, BrokenCall) else self._tools.get(call.name)
        try:
            if isinstance(call, BrokenCall):
                raise ToolFailed(call.reason)
            if tool is None:
                names = ", ".join(self._tools) or "none"
                raise ToolFailed(f"there is no tool {call.name[:80]!r}; the tools are: {names}")
            if flaw := _flaw_of(call.arguments, tool.parameters):
                raise ToolFailed(f"{tool.name} {flaw}")
            answer = RawMessage("tool", await self._result(tool, call.arguments))
            try:
                (shown,) = await look_at([answer], tool.spelled, self._limits.images)
            except Malformed as error:
                reason = f"the result of {tool.name} cannot be shown: {error}"
                raise ToolFailed(reason) from error
            text, images, is_error = shown.content, shown.images, False
        except ToolFailed as failure:
            text, is_error = f"Error: {failure}", True
        seconds = time.perf_counter() - begin
        if isinstance(call, BrokenCall) or tool is None:
            return ToolResult(text, is_error, seconds)
        return ToolResult(text, is_error, seconds, images, tool.name, call.id)

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the schemas of the tools, as chat templates show them."""
        return [tool.schema for tool in self._tools.values()]

    def close(self) -> None:
        """End all processes, and the thread. Twice is a no-op."""
        self._processes.close()
        self._loop.end()

    async def _result(self, tool: Tool, arguments: Mapping[str, object]) -> Content:
        function = tool.function
        if function is None or tool.name in self._numbers:
            number = self._numbers[tool.name]
            call = self._processes.submit(lambda process: process.run(number, arguments))
            return await asyncio.wrap_future(call)
        work = self._run_coroutine(tool.name, function, arguments)
        if tool.spelled in BUILT_IN_TOOLS:  # they end, and in turn: an engine's steps repeat
            result: asyncio.Future[Content] = asyncio.ensure_future(work)
        else:
            result = asyncio.wrap_future(self._loop.start(work))
        try:
            await asyncio.wait({result}, timeout=self._limits.timeout_s)
            if not result.done():
                raise ToolFailed(f"{tool.name} took longer than {self._limits.timeout_s:g} s")
            return result.result()
        finally:
            result.cancel()

    async def _run_coroutine(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, object]
    ) -> Content:
        max_chars = self._limits.max_chars
        try:
            return to_content(await function(**arguments), max_chars=max_chars)
        except BaseException as error:  # any user code; SystemExit would end the thread
            # A sandbox that is down says nothing of the program: its conversation is left out.
            if is_cancelled(error) or isinstance(error, SandboxError):
                raise
            reason = to_text(last_line(error), max_chars=max_chars)
            raise ToolFailed(f"{name} raised {reason}") from error


def _flaw_of(arguments: Mapping[str, object], parameters: Schema) -> str:
    """Return why arguments do not fit; empty if they do."""
    known = parameters["properties"]
    names = ", ".join(known) or "no arguments"
    if unknown := [name for name in arguments if name not in known]:
        return f"has no argument {unknown[0][:80]!r}; it takes {names}"
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"needs the argument {missing[0]!r}; it takes {names}"
    for name, value in arguments.items():
        kind, is_nullable = known[name].get("type"), known[name].get("nullable", False)
        if isinstance(kind, str) and not (value is None and is_nullable):
            is_kind = isinstance(value, _OF_JSON_TYPE.get(kind, (object,)))
            if not is_kind or (isinstance(value, bool) and kind in ("integer", "number")):
                return f"takes {name} of type {kind}, not {type(value).__name__}"
        if "enum" in known[name] and value not in known[name]["enum"]:
            return f"takes for {name} one of {known[name]['enum']}"
    try:
        to_json_text(dict(arguments))
    except (TypeError, ValueError):
        return "takes values of JSON alone"
    return ""
