"""The ``agent`` section: how a response comes about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import Rows, Seconds

SINGLE_TURN = "single_turn"
ENVIRONMENT = "environment"
PROXY = "proxy"
BUILT_IN_AGENTS = (SINGLE_TURN, "tool_calls", ENVIRONMENT, PROXY)
BUILT_IN_ENVIRONMENTS = ("Calculator",)
OPENENV = "openenv:"
"""Before the address of a server of OpenEnv."""
SEARCH = "search"
MCP = "mcp:"
"""Before the command of a server of the Model Context Protocol."""
BUILT_IN_TOOLS = ("calculator", "python", SEARCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """The program behind a response. Mirrors hydra_configs/agent/*.yaml key by key."""

    loop: str
    """``single_turn`` samples one response. ``tool_calls`` lets the model call tools until a turn
    has no call. ``environment`` has ``agent.environment`` answer each turn. ``proxy`` runs a
    program that samples as a client of OpenAI or Anthropic. Or ``path/to/file.py:Class``."""

    environment: str | None
    """With ``agent.loop=environment``: a class with reset and step, or a function that makes one,
    ``path/to/file.py:Class``, or Calculator, or a server, ``openenv:http://HOST:PORT``. Null:
    none."""

    command: tuple[str, ...]
    """Of ``agent.loop=proxy``: program and arguments, run for each conversation."""

    columns: tuple[str, ...]
    """Further columns of the data that the agent, environment or program gets, as ``row.columns``.
    """

    tools: tuple[str, ...]
    """Functions that the model may call: built-in names (calculator, python, search),
    ``path/to/file.py:function``, and all tools of an MCP server, ``"mcp:COMMAND ARGUMENTS"``."""

    search_folder: str | None
    """Folder of .txt and .md files that the tool ``search`` searches. Null: none."""

    tool_format: Literal[
        "hermes",
        "llama3_json",
        "pythonic",
        "qwen3_coder",
        "glm45",
        "kimi_k2",
        "gpt_oss",
        "deepseek_v3",
        "deepseek_v31",
        "response_template",
    ]
    """How the model writes calls: ``hermes`` is JSON in tool_call tags (Hermes, Qwen),
    ``llama3_json`` a turn of JSON alone, ``pythonic`` is ``[name(key=value)]``; others are named by
    their models, and ``response_template`` is what the tokenizer says. They need transformers 5.15
    or newer."""

    sandbox: str
    """Of the tool ``python``: namespaces or limits, on the rank's machine, ``docker:IMAGE``, or the
    address of a server of SandboxFusion."""

    history: Literal["strict", "keep", "branch"]
    """``strict`` refuses a chat template that renders earlier turns differently once others follow;
    ``keep`` trains on the conversation as it was sampled; ``branch`` begins a new sequence of the
    same response with them as rendered."""

    max_turns: Annotated[int, Field(ge=1, le=10_000)]
    """Turns of the assistant in a conversation. ``rollout.max_response_tokens`` limits all tokens
    behind the prompt together, tool results and contexts of further sequences among them."""

    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of a step's conversations that may break off by an error of a tool, environment or
    program. They are left out of learning; with more of them the run ends with the last error."""

    timeout_s: Seconds
    """Seconds that a conversation may take. One that exceeds this or another limit ends truncated
    and is counted."""

    num_conversations: Rows
    """Conversations that a rank holds at the same time."""

    tool_timeout_s: Seconds
    """Seconds that one call of a tool may take."""

    max_result_chars: Annotated[int, Field(ge=16, le=2**24)]
    """Characters of a tool's result that the model gets; of a longer one it gets both ends."""

    @property
    def is_single_turn(self) -> bool:
        """Whether responses are sampled without an agent."""
        return self.loop == SINGLE_TURN
