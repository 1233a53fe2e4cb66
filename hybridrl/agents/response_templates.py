"""Formats of calls that transformers reads by a *response template*.

Its parser is made for serving, and leaves out what it does not understand. Here a turn is cut into
its calls first, and one that is not understood to its last character is a broken one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from hybridrl.agents.tool_calls import (
    BrokenCall,
    Calls,
    ToolCall,
    ToolFormat,
    end_of_thoughts,
    to_call,
)
from hybridrl.errors import AgentError, shown

_CALLS = "tool_calls"
_FORMS: Mapping[str, tuple[str, str, str]] = {
    "qwen3_coder": (
        r"<tool_call>\s*(?:<function=(?P<name>[^>\s]+)>)?",
        r"</function>\s*</tool_call>",
        r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
    ),
    "glm45": (
        r"<tool_call>\s*(?P<name>[^\s<]+)?",
        r"</tool_call>",
        r"<arg_key>\s*(?P<key>[^<\s]+)\s*</arg_key>\s*"
        r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
    ),
    "kimi_k2": (
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?:(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>)?"
        r"|<\|tool_calls_section_begin\|>",
        r"<\|tool_call_end\|>",
        "",
    ),
    "gpt_oss": (
        r"(?:(?:<\|start\|>assistant)?<\|channel\|>[^<]*?\bto=|<\|start\|>assistant\s+to=|^\s*to=)"
        r"(?:functions\.(?P<name>[\w-]+)"
        r"[^<]*(?:<\|(?:channel|constrain)\|>[^<]*){0,2}<\|message\|>)?",
        r"<\|call\|>|<\|end\|>|\Z",  # the first is the stop token, which a turn lacks here
        "",
    ),
    "deepseek_v3": (
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
        r"(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\n)?|<｜tool▁calls▁begin｜>",
        r"\s*```\s*<｜tool▁call▁end｜>",
        "",
    ),
    "deepseek_v31": (
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
        r"(?:(?P<name>[^\s<]+)<｜tool▁sep｜>)?|<｜tool▁calls▁begin｜>",
        r"<｜tool▁call▁end｜>",
        "",
    ),
}
"""By format: how a call begins, how it ends, and an argument in it; empty: they are JSON.

Regular expressions with the groups ``name``, ``id``, ``key`` and ``value``. The first token of a
call is enough for a beginning: what follows it was meant as a call.
"""


def load_format(name: str, tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat:
    """Return a format of the table, or with ``response_template`` the tokenizer's own.

    AgentError: the tokenizer has none that describes calls.
    """
    own = vars(tokenizer).get("response_template") if tokenizer else None
    try:
        reader = _Reader(_template_of(*_FORMS[name]) if name in _FORMS else own)
    except (KeyError, ValueError) as error:
        raise AgentError(
            f"agent.tool_format={name}: the tokenizer's response_template describes no calls "
            f"({error}); correct tokenizer_config.json, or set agent.tool_format=hermes"
        ) from error
    return ToolFormat(reader.read, reader.begin)


def _template_of(begin: str, end: str, argument: str) -> dict[str, object]:
    number = {"id": "{id}"} if "(?P<id>" in begin else {}
    call = {"function": {"name": "{name}", "arguments": "{content}"}, **number}
    field = {"open_pattern": begin, "close_pattern": end, "transform": call, "repeats": True}
    given = {"tag_pattern": argument, "merge_duplicates": True}
    content = {"content": "xml-inline", "content_args": given} if argument else {"content": "json"}
    # Without a prefix the anchor is not looked for.
    return {"start_anchor": "-", "fields": {_CALLS: field | content}}


class _Reader:
    def __init__(self, template: object) -> None:
        self._template = load_response_template(template)
        self._field = self._template.fields[_CALLS]
        self.begin: re.Pattern[str] = self._field.open_re

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
        begins = [match.start() for match in self.begin.finditer(text, end_of_thoughts(text))]
        # Values of JSON have types: they are not for the schema to choose.
        typing = () if self._field.content == "json" else tools
        calls: list[ToolCall | BrokenCall] = []
        for piece in (text[begin:end] for begin, end in pairwise([*begins, len(text)])):
            try:
                self._require_whole(piece)
                message = parse_response(piece, self._template, prefix="", tools=typing)
                calls += [_call_of(value) for value in message[_CALLS]]
            except (ValueError, KeyError, RecursionError) as error:
                reason = error.__cause__ or error  # of JSON: without the text once more
                rule = f"the call {shown(piece.strip())} cannot be read: {reason}"
                rule += "; write it in the form that was shown with the tools"
                calls.append(BrokenCall(rule))
        return tuple(calls)

    def _require_whole(self, piece: str) -> None:
        """Raise ValueError if the parser would leave something out."""
        begin, close = self.begin.match(piece), self._field.close_re
        if begin is None or begin.groupdict().get("name", "") is None:
            raise ValueError("it has no name")
        end = close.search(piece, begin.end()) if close else None
        if close and end is None:
            raise ValueError("it has no end")
        argument = self._field.content_args.get("tag_pattern")
        body = piece[begin.end() : end.start() if end else None]
        if argument and (left := re.sub(argument, "", body, flags=re.DOTALL).strip()):
            raise ValueError(f"{shown(left)} is no argument")


def _call_of(value: Mapping[str, Any]) -> ToolCall:
    return replace(to_call(value["function"], arguments="arguments"), id=str(value.get("id", "")))
