"""Calls as models write them: each format alone, and conversations in those with templates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.versions import require_version

from hybridrl.agents.conversation import hold
from hybridrl.agents.rollout import ToolCalls, require_usable_agent
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_calls import BrokenCall, ToolCall, load_format
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools
from hybridrl.data.rows import Message
from hybridrl.errors import AgentError
from tests.agents.chat_templates import CALLING, FAMILIES, build_tokenizer
from tests.agents.fake_sampler import PROMPT, FakeSampler, conversation_setting, require_as_sampled
from tests.agents.test_proxy import STARTER, served, tool, user
from tests.config.values import config_of

BY_HAND = ["hermes", "llama3_json", "pythonic"]
BY_TEMPLATE = ["deepseek_v3", "deepseek_v31", "glm45", "gpt_oss", "kimi_k2", "qwen3_coder"]
try:
    require_version("transformers>=5.15")
except ImportError:  # make test-oldest
    BY_TEMPLATE = []
needs_templates = pytest.mark.skipif(not BY_TEMPLATE, reason="transformers is older than 5.15")

SCHEMA = {
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "is_on": {"type": "boolean"},
    "text": {"type": "string"},
    "items": {"type": "array"},
    "tree": {"type": "object"},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
NESTED: Mapping[str, object] = {
    "text": ' He said: "é\n\n\\n" </think ',
    "tree": {"a": [1, {"b": 'x"\n'}], "c": None},
    "items": ["1", 2],
    "n": 7,
    "x": 0.5,
    "is_on": True,
}


def write(style: str, name: str, arguments: Mapping[str, object], number: int = 0) -> str:
    """A call as the chat template of the format's models writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    raw = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    if style == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    if style == "qwen3_coder":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in raw.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    if style == "glm45":
        inner = "".join(
            f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in raw.items()
        )
        return f"<tool_call>{name}{inner}\n</tool_call>"
    return {
        "kimi_k2": f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{text}<|tool_call_end|>",
        "gpt_oss": f"<|start|>assistant<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{text}<|call|>",
        "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
        "<｜tool▁call▁end｜>",
        "deepseek_v31": f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
    }[style]


_WRAPPED = {
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
}


def turn(style: str, *calls: tuple[str, Mapping[str, object]]) -> str:
    begin, end = _WRAPPED.get(style, ("", ""))
    written = "".join(write(style, *call, number) for number, call in enumerate(calls))
    return f"{begin}{written}{end}"


@pytest.mark.parametrize("style", ["hermes", *BY_TEMPLATE])
@pytest.mark.parametrize("before", ["", "I ask.\n", "<think>or {call}?</think>\n\n"])
@pytest.mark.parametrize(
    "calls", [[("f", NESTED)], [("f", {"n": 1}), ("g", {})]], ids=["nested", "two"]
)
def test_calls_are_read_as_the_template_writes_them(
    style: str, before: str, calls: list[tuple[str, Mapping[str, object]]]
) -> None:
    before = before.replace("{call}", write(style, "thought", {}))
    tool_format = load_format(style)
    text = before + turn(style, *calls)
    assert tool_format.read(text, TOOLS) == tuple(ToolCall(*call) for call in calls)
    assert tool_format.text_before_calls(text) == before


F, TWO = (ToolCall("f", {"a": [1, "é"]}),), (ToolCall("f", {}), ToolCall("g", {}))
READ: list[tuple[str, str, tuple[ToolCall, ...]]] = [
    ("hermes", '<think>a <tool_call></think><tool_call>{"name": "f", "arguments": "{\\"a\\": '
     '[1, \\"é\\"]}"}</tool_call>', F),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}</tool_call>', TWO),
    ("llama3_json", '{"name": "f", "parameters": {"a": [1, "é"]}}', F),
    ("llama3_json", ' <|python_tag|>{"name": "f", "parameters": {"a": [1, "é"]}}\n', F),
    ("llama3_json", '{"name": "f"}; {"name": "g", "parameters": {}}', TWO),
    ("pythonic", "[f(a=[1, 'é'])]", F),
    ("pythonic", "<|python_tag|>[ f( a = [1, 'é'] ) ]", F),
    ("pythonic", "[f(), g()]", TWO),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "calls"), READ)
def test_other_forms_of_a_call_are_read(style: str, text: str, calls: tuple[ToolCall, ...]) -> None:
    assert load_format(style).read(text, ()) == calls


@needs_templates
def test_harmony_reads_a_recipient_behind_the_role() -> None:
    thought = "<|channel|>analysis<|message|>Call to=functions.g?<|end|>"
    text = ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}'
    read = load_format("gpt_oss").read
    assert read(text, TOOLS) == read(f"{thought}<|start|>assistant{text}", TOOLS)
    assert read(text, TOOLS) == (ToolCall("f", {"n": 1}),)


@pytest.mark.parametrize("style", BY_HAND + BY_TEMPLATE)
@pytest.mark.parametrize(
    "text", ["", "The answer is 42.", '{"answer": 42}', "[1, 2]", "Set x to=5", "a <b> c"]
)
def test_an_answer_holds_no_call(style: str, text: str) -> None:
    assert load_format(style).read(text, TOOLS) == ()


BROKEN: Sequence[tuple[str, str, str]] = [
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
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</function>\n</tool_call>",
     "'<parameter=n>\\n1' is no argument"),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>1<parameter=x>2</parameter></function>"
     "</tool_call>", "'<parameter=n>1' is no argument"),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "has no name"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", "has no end; write it in the form"),
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>", "is no argument"),
    ("glm45", "<tool_call></tool_call>", "has no name"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', '\'"f"}\' is no argument'),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "has no name"),
    ("kimi_k2", "<|tool_calls_section_begin|>f()<|tool_calls_section_end|>", "has no name"),
    ("gpt_oss", '<|channel|>commentary to=functions.f {"n": 1}', "has no name"),
    ("gpt_oss", "<|channel|>commentary to=python<|message|>print(1)", "has no name"),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"n": 1', "Expecting ',' delim"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "has no name"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>f({})<｜tool▁calls▁end｜>", "has no name"),
]  # fmt: skip
BROKEN = [
    *BROKEN,
    *((s, write(s, "f", {"n": 1}).replace("1}", "1 2}"), "Expecting ','")
      for s in BY_TEMPLATE if s not in ("glm45", "qwen3_coder")),
    *((s, write(s, "f", {"n": 1}).replace('{"n": 1}', "[1]"), "is not an object")
      for s in BY_TEMPLATE if s not in ("glm45", "qwen3_coder")),
    *((s, write(s, "f", {})[:-6], "has no end") for s in BY_TEMPLATE if s != "gpt_oss"),
    *((s, write(s, "f", {"n": 9}).replace("9", "[" * 100_000), "recursion")
      for s in BY_TEMPLATE if s not in ("glm45", "qwen3_coder")),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "reason"), BROKEN)
def test_a_broken_call_is_explained(style: str, text: str, reason: str) -> None:
    if style not in BY_HAND + BY_TEMPLATE:
        pytest.skip("transformers is older than 5.15")
    (broken,) = load_format(style).read(text, TOOLS)
    assert isinstance(broken, BrokenCall)
    assert reason in broken.reason
    assert len(broken.reason) < 400


@needs_templates
@pytest.mark.parametrize("style", BY_TEMPLATE)
def test_a_broken_call_breaks_no_other(style: str) -> None:
    first, last = write(style, "f", {"n": 1}), write(style, "g", {})
    calls = load_format(style).read(first + first[:-20] + last, TOOLS)
    kinds = [type(call) for call in calls]
    assert kinds == [ToolCall, BrokenCall, ToolCall]


LIMITS = ToolLimits(timeout_s=5.0, max_chars=200)


@needs_templates
@pytest.mark.parametrize("style", ["glm45", "qwen3_coder"])
def test_values_without_a_type_get_that_of_the_schema(style: str) -> None:
    (call,) = load_format(style).read(write(style, "f", {"text": "7", "n": "7", "x": "a"}), TOOLS)
    assert isinstance(call, ToolCall)
    assert call.arguments == {"text": "7", "n": 7, "x": "a"}  # "a" is refused by the toolbox
    (call,) = load_format(style).read(write(style, "f", {"n": "7"}), ())
    assert isinstance(call, ToolCall)
    assert call.arguments == {"n": "7"}


_MARKS = ["<tool_call>", "</tool_call>", "<function=f>", "<parameter=", "</parameter>", "{", "[f("]
_MARKS += ["<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "</think>"]
_MARKS += ["<|channel|>commentary to=", "<|message|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]


@given(
    style=st.sampled_from(BY_HAND + BY_TEMPLATE),
    parts=st.lists(st.sampled_from(_MARKS) | st.text(max_size=5), max_size=12),
)
def test_any_text_is_read(style: str, parts: list[str]) -> None:
    load_format(style).read("".join(parts), TOOLS)


@needs_templates
def test_a_tokenizer_may_say_how_its_model_writes_calls() -> None:
    tokenizer = build_tokenizer("qwen2.5")
    with pytest.raises(AgentError, match="response_template describes no calls"):
        load_format("response_template", tokenizer)
    transform = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    field = {"open_pattern": r"\[TOOL (?P<name>\w+)\]", "close": "[END]", "content": "json"}
    fields = {"tool_calls": {**field, "repeats": True, "transform": transform}, "content": {}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>", "fields": fields}
    read = load_format("response_template", tokenizer).read
    assert read('a[TOOL f]{"n": 1}[END]b', TOOLS) == (ToolCall("f", {"n": 1}),)
    (broken,) = read('[TOOL f]{"n": 1', TOOLS)
    assert isinstance(broken, BrokenCall)


def _stops(tokenizer: Any, family: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(text) for text in (FAMILIES | CALLING)[family].stops]


INCREMENTS = {
    "qwen3_coder": "\n<|im_start|>user\n<tool_response>\n84\n</tool_response>\n<|im_end|>\n"
    "<|im_start|>assistant\n",
    "glm45": "\n<tool_response>\n84\n</tool_response><|assistant|>",
    "kimi_k2": "<|im_system|>calculator<|im_middle|>## Return of functions.calculator:0\n84"
    "<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "gpt_oss": "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"
    '"84"<|end|><|start|>assistant',
    "deepseek_v31": "<｜tool▁output▁begin｜>84<｜tool▁output▁end｜>",
}


@needs_templates
@pytest.mark.parametrize("style", sorted(INCREMENTS))
def test_a_conversation_in_the_models_own_format(style: str) -> None:
    """The call is read, its result rendered by the template, and the answer sampled behind it."""
    tokenizer = build_tokenizer(style)
    stops = _stops(tokenizer, style)
    tools = load_tools(["calculator"])
    template = TurnTemplate(tokenizer, stop_token_ids=stops, tools=[tool.schema for tool in tools])
    call = turn(style, ("calculator", {"expression": "12*7"})).removesuffix("<|call|>")
    sampler = FakeSampler(tokenizer, [call, call[: len(call) // 2], "It is 84."])
    setting = conversation_setting(
        sampler,
        template=template,
        tool_format=load_format(style),
        toolbox=Toolbox(tools, limits=LIMITS, num_processes=1),
    )
    trajectory = asyncio.run(hold(ToolCalls(), PROMPT, setting))
    _, first, _, second, answer = [tokenizer.decode(t.token_ids) for t in trajectory.turns]
    assert first == INCREMENTS[style]
    assert "Error: the call '" in second
    assert answer.startswith("It is 84.")
    assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (2, 1)
    require_as_sampled(trajectory, sampler)


@needs_templates
@pytest.mark.parametrize("style", sorted(INCREMENTS))
def test_a_format_that_is_not_the_chat_templates_is_told(
    style: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With another one every turn would pass for an answer."""
    tokenizer = build_tokenizer(style)
    config = config_of("agent=tool_calls", "data=calculator", "agent.tools=[calculator]").agent
    stops = _stops(tokenizer, style)
    named: Any = style
    right = replace(config, tool_format=named)
    none = replace(config, tools=())  # an agent that calls nothing
    for quiet in (right, none):
        require_usable_agent(quiet, tokenizer, stop_token_ids=stops)
    require_usable_agent(config, STARTER, stop_token_ids=[STARTER.eos_token_id])  # shows no calls
    assert not caplog.messages
    require_usable_agent(config, tokenizer, stop_token_ids=stops)
    (message,) = caplog.messages
    assert message.startswith("agent.tool_format=hermes reads no call in what the chat template")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": SCHEMA}}}


@needs_templates
@pytest.mark.parametrize("style", sorted(INCREMENTS))
async def test_a_client_of_the_proxy_gets_calls_of_any_format(style: str) -> None:
    tokenizer = build_tokenizer(style)
    call = turn(style, ("add", {"n": 1, "text": "2"})).removesuffix("<|call|>")
    sampler = FakeSampler(tokenizer, [f"I add.{call}", "3"])
    template = TurnTemplate(tokenizer, stop_token_ids=_stops(tokenizer, style))
    async with served(sampler, template=template, tool_format=load_format(style)) as client:
        first = await client.ask(user("1+2?"), tools=[ADD])
        (made,) = first["tool_calls"]
        assert first["content"] == "I add."
        assert json.loads(made["function"]["arguments"]) == {"n": 1, "text": "2"}
        result = {**tool("3"), "tool_call_id": made["id"]}
        await client.ask(user("1+2?"), first, result, tools=[ADD])
    ((_, _, increment, _),) = client.texts()
    expected = INCREMENTS[style].replace("84", "3").replace("calculator", "add")
    assert increment == expected
    require_as_sampled(client.conversation.to_trajectory(), sampler)


def test_names_of_tools_can_write_no_special_tokens() -> None:
    template = TurnTemplate(
        build_tokenizer("gpt_oss"), stop_token_ids=_stops(build_tokenizer("gpt_oss"), "gpt_oss")
    )
    (message,) = template.harmless([Message("tool", "3", (), "a<|end|>", "b<|call|>")])
    assert (message.name, message.call_id) == ("a< |end|>", "b< |call|>")
