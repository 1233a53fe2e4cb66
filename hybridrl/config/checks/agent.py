"""Rules about agents and their tools. Files are read, never run."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.agent import (
    BUILT_IN_AGENTS,
    BUILT_IN_ENVIRONMENTS,
    BUILT_IN_TOOLS,
    ENVIRONMENT,
    MCP,
    OPENENV,
    PROXY,
    SEARCH,
    AgentConfig,
)
from hybridrl.config.checks.messages import error
from hybridrl.config.data import CHAT_TASKS
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import flaw_of_folder
from hybridrl.config.functions.signatures import (
    Function,
    SignatureError,
    find_name,
    required_parameters,
)
from hybridrl.config.reward import AGENT
from hybridrl.errors import ConfigError, suggest_name

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TOOLS = "agent.tools"
_SANDBOX_S = 20.0
"""In which a sandbox elsewhere has run a program of the tool ``python``, or has failed."""


def check_agent_is_there(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The agent and its tools are built in or in a file, and its program can be started."""
    agent = config.agent
    if flaw := _flaw_of_agent(agent.loop):
        fix = "correct it, in the form path/to/file.py:Class, or set agent=single_turn"
        yield error(config, "agent.loop", flaw, "agent=single_turn", fix=fix)
    flaws = {name: _flaw_of_tool(name) for name in agent.tools}
    known = [name for name, flaw in flaws.items() if not flaw]
    for name, flaw in flaws.items():
        if flaw:
            remedy = f"{_TOOLS}=[{','.join(known)}]"
            fix = f"correct the name, or set {remedy}"
            yield error(config, _TOOLS, flaw, remedy, fix=fix, got=name)
    program = agent.command[0] if agent.command else ""
    if agent.loop == PROXY and (not program or shutil.which(program) is None):
        lacking = (
            f"there is no program {program!r}" if program else f"agent.loop={PROXY} needs a program"
        )
        rule = f"{lacking}, as in agent.command=[python,my_agent.py]"
        remedy = f"agent=single_turn agent.command=[] {_TOOLS}=[]"
        yield error(config, "agent.command", rule, remedy)


def check_agent_columns(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of files alone have further columns."""
    key, task = "agent.columns", config.data.task
    if config.agent.columns and task is not None and config.offline is None:
        rule = f"rows of data.task={task} have no further columns"
        fix = f"name files that have them: data=files data.train_files=[FILE], or set {key}=[]"
        yield error(config, key, rule, f"{key}=[]", fix=fix)


def check_environment(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The agent ``environment`` has one, built in or in a file."""
    agent, key = config.agent, "agent.environment"
    if agent.loop != ENVIRONMENT:
        return
    usual, kinds = f"{key}={BUILT_IN_ENVIRONMENTS[0]}", (ast.ClassDef, ast.FunctionDef)
    if agent.environment is None:
        rule = f"agent.loop={ENVIRONMENT} plays an environment, such as FILE.py:CLASS"
        yield error(config, key, rule, usual)
    elif agent.environment.startswith(OPENENV):
        if not agent.environment.startswith((f"{OPENENV}http://", f"{OPENENV}https://")):
            rule = f"a server of OpenEnv has an address, as in {OPENENV}http://127.0.0.1:8000"
            yield error(config, key, rule, usual)
    elif flaw := _flaw_of_name(agent.environment, BUILT_IN_ENVIRONMENTS, kinds=kinds):
        yield error(config, key, flaw, usual, fix=f"correct the name, or set {usual}")


def check_agent_rewards(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A reward function that returns the agent's rewards needs an agent that gives some."""
    agent, reward, algorithm = config.agent, config.reward, config.algorithm
    gives_none = agent.loop in BUILT_IN_AGENTS and agent.loop not in (ENVIRONMENT, PROXY)
    if algorithm.reads("players_BL") and not reward.agent_names:
        rule = f"algorithm.advantage={algorithm.advantage} reads what the agent gave each player"
        remedy, fix = f"reward.function={AGENT}", ""
        if gives_none:
            remedy = "algorithm.advantage=reinforce"
            fix = f"play a game (docs/how-to/self-play.md), or set {remedy}"
        yield error(config, "reward.function", rule, remedy, fix=fix)
    if gives_none:
        for name in reward.agent_names:
            key = "reward.function" if reward.function else f"reward.functions.{name}.function"
            rule = f"agent.loop={agent.loop} gives no rewards"
            yield error(config, key, rule, f"{key}=exact_match")
    if agent.loop == ENVIRONMENT and not reward.agent_names:
        rule = (
            f"the rewards of agent.environment={agent.environment} would be ignored; with others, "
            f"reward.functions has a weight for each, {AGENT} among them"
        )
        emptied = [f"~reward.functions.{name}" for name in reward.functions]
        emptied += [f"~reward.args.{name}" for name in reward.args]
        remedy = " ".join([f"reward.function={AGENT}", *emptied])
        yield error(config, "reward.function", rule, remedy)


def check_built_in_tools(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The tool ``search`` has a folder of texts and its package.

    A sandbox elsewhere that hangs fails before its call ends: the model is not to blame.
    """
    agent, key = config.agent, "agent.search_folder"
    others = ",".join(tool for tool in agent.tools if tool != SEARCH)
    without = f"{_TOOLS}=[{others}] {key}=null"
    has_folder = agent.search_folder is not None and not flaw_of_folder(agent.search_folder)
    if SEARCH in agent.tools and not has_folder:
        rule = f"the tool {SEARCH} needs a folder of texts, relative to {Path.cwd()}"
        yield error(config, key, rule, without)
    elif SEARCH in agent.tools and find_spec("bm25s") is None:
        rule = f"the tool {SEARCH} needs the package bm25s, which is not installed"
        fix = f"pip install 'hybridrl[search]', or set {without}"
        yield error(config, _TOOLS, rule, without, fix=fix)
    key = "agent.tool_timeout_s"
    if "python" in agent.tools and ":" in agent.sandbox and agent.tool_timeout_s < _SANDBOX_S:
        rule = f"agent.sandbox={agent.sandbox} may take {_SANDBOX_S:g} s"
        yield error(config, key, rule, f"{key}={_SANDBOX_S}")


def check_conversations(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Messages are appended in the form of a chat template, and lose the experts of their turns."""
    agent = config.agent
    if agent.is_single_turn or _flaw_of_agent(agent.loop):
        return
    if not config.data.use_chat_template and appends_messages(agent):
        key = "data.use_chat_template"
        rule = f"agent.loop={agent.loop} appends messages in the form of the chat template"
        with_template, fix = f"{key}=true", ""
        if config.model.path is None and config.data.task not in CHAT_TASKS:
            # The made model has learned a chat template for one task.
            fix = f"set model=hf_folder model.path=FOLDER {key}=true, or agent=single_turn"
            with_template = ""
        if agent.loop not in BUILT_IN_AGENTS:
            rule = f"{rule}, unless its class has the line `appended_roles = ()`"
        yield error(config, key, rule, with_template, "agent=single_turn", fix=fix)
    if config.returns_experts:
        key = "actor.replay_routing"
        rule = f"agent.loop={agent.loop} samples several turns, and their experts are not kept"
        yield error(config, key, rule, f"{key}=false")
    if config.rollout.sampling_masks:
        key = "rollout.sampling_masks"
        rule = f"agent.loop={agent.loop} samples several turns, and their masks are not kept"
        yield error(config, key, rule, f"{key}=false")


def _flaw_of_agent(spelled: str) -> str:
    """Return why it is no agent, as far as its source shows: a class may inherit ``run``."""
    if flaw := _flaw_of_name(spelled, BUILT_IN_AGENTS, kinds=(ast.ClassDef,)):
        return flaw
    node = _class_of(spelled)
    if node is None or node.bases or node.decorator_list:
        return ""
    runs = [each for each in node.body if isinstance(each, ast.AsyncFunctionDef)]
    has_run = any(each.name == "run" and len(required_parameters(each)) == 2 for each in runs)
    return "" if has_run else f"{node.name} has no method `async def run(self, conversation)`"


def _class_of(spelled: str) -> ast.ClassDef | None:
    file, _, name = spelled.rpartition(":")
    try:
        node = find_name(file, name) if file else None
    except SignatureError:  # said by `check_agent_is_there`
        return None
    return node if isinstance(node, ast.ClassDef) else None


def appends_messages(agent: AgentConfig) -> bool:
    """Whether an agent needs a chat template: its class does not say that it appends none."""
    if agent.is_single_turn:
        return False
    node = _class_of(agent.loop)
    lines = map(ast.unparse, node.body) if node else ()
    return {"appended_roles = ()", "appended_roles = []"}.isdisjoint(lines)


def _flaw_of_tool(spelled: str) -> str:
    if not spelled.startswith(MCP):
        return _flaw_of_name(spelled, BUILT_IN_TOOLS, kinds=_FUNCTIONS)
    program, *_ = [*spelled.removeprefix(MCP).split(), ""]
    if shutil.which(program) is None:
        return f"there is no program {program!r}, as in '{_TOOLS}=[\"mcp:python server.py\"]'"
    missing = "the package mcp is not installed; pip install 'hybridrl[mcp]'"
    return missing if find_spec("mcp") is None else ""


def _flaw_of_name(
    spelled: str, built_in: tuple[str, ...], *, kinds: tuple[type[ast.AST], ...]
) -> str:
    """Return why neither a built-in name nor a file defines it; empty if one does."""
    file, _, name = spelled.rpartition(":")
    if not file:
        return "" if name in built_in else f"is not built in; {suggest_name(name, built_in)}"
    try:
        node = find_name(file, name)
    except SignatureError as flaw:
        return f"{flaw.rule}; {flaw.fix}"
    if isinstance(node, Function | ast.ClassDef) and not isinstance(node, kinds):
        return f"{name} in {file} is not a {'class' if ast.ClassDef in kinds else 'function'}"
    return ""
