"""Parsers of tool calls: what they read, and what the model is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.tool_calls import PARSERS, BrokenCall, ToolCall

READ = [
    ("hermes", 'I ask.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'),
    ("hermes", '<think>a <tool_call></think><tool_call>{"name": "f", "arguments": "{\\"a\\": '
     '[1, \\"é\\"]}"}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {"a": [1, "é"]}}'),
    ("llama3_json", ' <|python_tag|>{"name": "f", "parameters": {"a": [1, "é"]}}\n'),
    ("pythonic", "[f(a=[1, 'é'])]"),
    ("pythonic", "<|python_tag|>[ f( a = [1, 'é'] ) ]"),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text"), READ)
def test_a_call_is_read(style: str, text: str) -> None:
    assert PARSERS[style](text) == (ToolCall("f", {"a": [1, "é"]}),)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}</tool_call>'),
        ("llama3_json", '{"name": "f"}; {"name": "g", "parameters": {}}'),
        ("pythonic", "[f(), g()]"),
    ],
)
def test_several_calls_are_read_in_order(style: str, text: str) -> None:
    assert PARSERS[style](text) == (ToolCall("f", {}), ToolCall("g", {}))


@pytest.mark.parametrize("style", sorted(PARSERS))
@pytest.mark.parametrize("text", ["", "The answer is 42.", '{"answer": 42}', "[1, 2]"])
def test_an_answer_holds_no_call(style: str, text: str) -> None:
    assert PARSERS[style](text) == ()


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("hermes", "<tool_call>{}", "<tool_call> has no </tool_call>"),
        ("hermes", "<tool_call>{</tool_call>", "Expecting property name"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', 'not an object with a text "name"'),
        ("hermes", '<tool_call>{"name": "f"} x</tool_call>', "'x' stands behind the object"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deep"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', '"parameters" is not an object'),
        ("llama3_json", '{"name": "f", "parameters": {"a": NaN}}', "NaN is not JSON"),
        ("pythonic", "[f(a=1]", "does not match"),
        ("pythonic", "[f(1)]", "f takes arguments by name alone"),
        ("pythonic", "[f(a=open('x'))]", "malformed node"),
        ("pythonic", "[f(a=1), 2]", "'2' is not a call"),
        ("pythonic", f"[f(a={'(' * 100_000})]", "write [NAME(KEY=VALUE)]"),
    ],
)
def test_a_broken_call_is_explained(style: str, text: str, reason: str) -> None:
    (broken,) = PARSERS[style](text)

    assert isinstance(broken, BrokenCall)
    assert reason in broken.reason
    assert len(broken.reason) < 400


@given(style=st.sampled_from(sorted(PARSERS)), text=st.text())
def test_any_text_is_read(style: str, text: str) -> None:
    for begin in ("", "<tool_call>", "{", "[f("):
        PARSERS[style](begin + text)
