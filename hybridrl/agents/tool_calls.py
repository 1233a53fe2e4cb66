"""Calls of tools in the text of a turn, in the formats that models were taught.

A call that cannot be read is not an error of the run: the model reads what was wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase
from transformers.utils.versions import require_version

from hybridrl.errors import AgentError, shown

_END_OF_THOUGHTS = "</think>"
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGINS_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function and its arguments, as the model wrote them."""

    name: str
    arguments: Mapping[str, object]
    id: str = field(default="", compare=False)
    """As the model or a client numbered the call; empty: not."""


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Text that was meant as a call."""

    reason: str
    """For the model: the mistake, and the form to write."""


Calls = tuple[ToolCall | BrokenCall, ...]


def parse_hermes(text: str) -> Calls:
    r"""Read ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, any number: Hermes, Qwen.

    Thoughts (all text up to ``</think>``) hold no calls.
    """
    calls: list[ToolCall | BrokenCall] = []
    _, *blocks = text[end_of_thoughts(text) :].split(_OPEN)
    for body, end, _ in (block.partition(_CLOSE) for block in blocks):
        if not end:
            calls.append(BrokenCall(f"{_OPEN} has no {_CLOSE}; close every call"))
            continue
        try:
            calls.append(to_call(_load_json(body), arguments="arguments"))
        except ValueError as error:
            reason = (
                f"the call {shown(body.strip())} cannot be read: {error}; write "
                f'{_OPEN}{{"name": "NAME", "arguments": {{"KEY": VALUE}}}}{_CLOSE}'
            )
            calls.append(BrokenCall(reason))
    return tuple(calls)


def end_of_thoughts(text: str) -> int:
    """Return where a turn's thoughts end: what they say of calls is none."""
    _, end, answer = text.rpartition(_END_OF_THOUGHTS)
    return len(text) - len(answer) if end else 0


def parse_llama3_json(text: str) -> Calls:
    r"""Read a turn that is ``{"name": .., "parameters": {..}}``, several with ``;`` between.

    A turn that begins otherwise, or is an object without a name, is an answer.
    """
    body, is_tagged = _without_tag(text)
    if not (is_tagged or body.startswith("{")):
        return ()
    try:
        values = list(_json_values(body))
        if not is_tagged and not any(isinstance(v, dict) and "name" in v for v in values):
            return ()
        return tuple(to_call(value, arguments="parameters") for value in values)
    except ValueError as error:
        reason = f"the call {shown(body.strip())} cannot be read: {error}"
        form = '{"name": "NAME", "parameters": {"KEY": VALUE}}'
        return (BrokenCall(f"{reason}; write {form}, and nothing else"),)


def parse_pythonic(text: str) -> Calls:
    """Read a turn that is ``[name(key=value), ..]``; values are Python literals.

    A turn that begins otherwise is an answer.
    """
    body, _ = _without_tag(text)
    if not _BEGINS_PYTHONIC.match(body):
        return ()
    try:
        return tuple(_python_calls(body))
    # Values nested too deep raise one of the latter two.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        flaw = error.msg if isinstance(error, SyntaxError) else str(error)
        reason = f"the call {shown(body.strip())} cannot be read: {flaw}"
        return (BrokenCall(f"{reason}; write [NAME(KEY=VALUE)], and nothing else"),)


def _python_calls(body: str) -> Iterator[ToolCall]:
    tree = ast.parse(body, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("it is not one list of calls")
    for call in tree.elts:
        if not isinstance(call, ast.Call):
            raise ValueError(f"{shown(ast.unparse(call))} is not a call")
        name = ast.unparse(call.func)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(f"{name} takes arguments by name alone")
        values = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        yield ToolCall(name, values)


def _without_tag(text: str) -> tuple[str, bool]:
    _, tag, after = text.partition(_PYTHON_TAG)
    return (after.strip(), True) if tag else (text.strip(), False)


def _json_values(text: str) -> Iterator[object]:
    """Yield the JSON values of a text, with ``;`` or nothing between them."""
    while text := text.lstrip(" \t\r\n;"):
        value, end = _decode_json(text)
        yield value
        text = text[end:]


def _load_json(text: str) -> object:
    value, end = _decode_json(text.strip())
    if behind := text.strip()[end:].strip():
        raise ValueError(f"{shown(behind.strip())} stands behind the object")
    return value


def _decode_json(text: str) -> tuple[object, int]:
    try:
        value: tuple[object, int] = _DECODER.raw_decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def to_call(value: object, *, arguments: str) -> ToolCall:
    """Read an object with a name and ``arguments``; ValueError: it is of another form."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('it is not an object with a text "name"')
    given = value.get(arguments, {})
    if isinstance(given, str):  # as the interface of OpenAI has it
        given = _load_json(given)
    if not isinstance(given, dict):
        raise ValueError(f'"{arguments}" is not an object')
    return ToolCall(value["name"], given)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of calls, ``agent.tool_format``."""

    read: Callable[[str, Sequence[Mapping[str, Any]]], Calls]
    """Reads a turn. Formats without types of their own take those of the schemas of the tools."""

    begin: re.Pattern[str]
    """Of the first call."""

    def text_before_calls(self, text: str) -> str:
        """Return the text of a turn before its calls."""
        first = self.begin.search(text, end_of_thoughts(text))
        return text[: first.start()] if first else ""


_BY_HAND: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda text, _: parse_hermes(text), re.compile(_OPEN)),
    # A turn of calls has no other text.
    "llama3_json": ToolFormat(lambda text, _: parse_llama3_json(text), re.compile(r"\A")),
    "pythonic": ToolFormat(lambda text, _: parse_pythonic(text), re.compile(r"\A")),
}


def load_format(name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> ToolFormat:
    """Return the format of ``agent.tool_format``; AgentError: it cannot be read here."""
    if name in _BY_HAND:
        return _BY_HAND[name]
    try:
        require_version("transformers>=5.15")  # those before have no such parser
        module = import_module("hybridrl.agents.response_templates")
        loaded: ToolFormat = module.load_format(name, tokenizer)
    except ImportError as error:
        raise AgentError(f"agent.tool_format={name}: {error}; update it") from error
    return loaded
