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
    PROXY,
    SEARCH,
    SINGLE_TURN,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import flaw_of_file
from hybridrl.config.python_files import ANYTHING, names_at_top_level
from hybridrl.config.reward import AGENT
from hybridrl.errors import ConfigError, instruction, suggest_name


def check_agent_is_known(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An agent is built in, or a class in a file."""
    loop = config.agent.loop
    if loop in BUILT_IN_AGENTS:
        return
    if flaw := _flaw_of_name(loop, BUILT_IN_AGENTS, kinds=(ast.ClassDef,)):
        yield _unknown("agent.loop", loop, flaw, remedy="agent=single_turn")


def check_environment_is_known(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The agent ``environment`` has one, built in or in a file; others have none."""
    agent, key = config.agent, "agent.environment"
    if agent.loop != ENVIRONMENT:
        if agent.environment is not None:
            rule = f"would be ignored, because agent.loop={agent.loop} plays none"
            remedies = [(f"{key}=null",)]
            yield ConfigError(key, agent.environment, rule, remedies=remedies)
        return
    remedies = [(f"{key}={BUILT_IN_ENVIRONMENTS[0]}",)]
    if agent.environment is None:
        rule = f"agent.loop={ENVIRONMENT} plays an environment, such as FILE.py:CLASS"
        yield ConfigError(key, None, rule, remedies=remedies)
        return
    kinds = (ast.ClassDef, ast.FunctionDef)
    if flaw := _flaw_of_name(agent.environment, BUILT_IN_ENVIRONMENTS, kinds=kinds):
        yield _unknown(key, agent.environment, flaw, remedy=remedies[0][0])


def check_agent_rewards_are_read(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A reward function that returns the agent's rewards needs an agent that gives some."""
    agent, reward = config.agent, config.reward
    gives_none = agent.loop in BUILT_IN_AGENTS and agent.loop != ENVIRONMENT
    for name in reward.agent_names if gives_none else ():
        key = "reward.function" if reward.function else f"reward.functions.{name}.function"
        rule = f"agent.loop={agent.loop} gives no rewards"
        remedies = [(f"{key}=exact_match",)]
        yield ConfigError(key, AGENT, rule, remedies=remedies)
    if agent.loop == ENVIRONMENT and not reward.agent_names:
        emptied = [f"~reward.functions.{name}" for name in reward.functions]
        emptied += [f"~reward.args.{name}" for name in reward.args]
        yield ConfigError(
            "reward.function",
            reward.function,
            f"the rewards of agent.environment={agent.environment} would be ignored; with others, "
            f"reward.functions has a weight for each, {AGENT} among them",
            remedies=[(f"reward.function={AGENT}", *emptied)],
        )


def check_tools_are_known(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A tool is built in, or a function in a file; and without an agent nobody calls it."""
    agent = config.agent
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    known = [name for name in agent.tools if not _flaw_of_name(name, BUILT_IN_TOOLS, kinds=kinds)]
    for name in agent.tools:
        if flaw := _flaw_of_name(name, BUILT_IN_TOOLS, kinds=kinds):
            remedy = f"agent.tools=[{','.join(known)}]"
            yield _unknown("agent.tools", name, flaw, remedy=remedy)
    if known and agent.loop in (SINGLE_TURN, ENVIRONMENT):
        rule = f"would be ignored, because agent.loop={agent.loop} calls none"
        yield ConfigError("agent.tools", list(agent.tools), rule, remedies=[("agent.tools=[]",)])


def check_agent_has_a_command(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The agent ``proxy`` is a program, which has tools of its own; others have none."""
    agent, is_proxy = config.agent, config.agent.loop == PROXY
    if not is_proxy and agent.command:
        rule = f"would be ignored, because agent.loop={agent.loop} runs no program"
        yield ConfigError(
            "agent.command", list(agent.command), rule, remedies=[("agent.command=[]",)]
        )
    if not is_proxy:
        return
    if agent.tools:
        rule = "would be ignored, because the program of agent.loop=proxy runs its own tools"
        yield ConfigError("agent.tools", list(agent.tools), rule, remedies=[("agent.tools=[]",)])
    if not agent.command or shutil.which(agent.command[0]) is None:
        program = agent.command[0] if agent.command else ""
        rule = f"there is no program {program!r}" if program else "agent.loop=proxy needs a program"
        single = ("agent=single_turn", "agent.command=[]", "agent.tools=[]")
        yield ConfigError(
            "agent.command",
            list(agent.command),
            f"{rule}, as in agent.command=[python,my_agent.py]",
            remedies=[single],
        )


def check_search_has_a_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The tool ``search`` has a folder of texts and its package; without it a folder is unread."""
    agent, key = config.agent, "agent.search_folder"
    if SEARCH not in agent.tools:
        if agent.search_folder is not None:
            rule = "would be ignored, because agent.tools has no search"
            remedies = [(f"{key}=null",)]
            yield ConfigError(key, agent.search_folder, rule, remedies=remedies)
        return
    remaining = ",".join(tool for tool in agent.tools if tool != SEARCH)
    without = (f"agent.tools=[{remaining}]", f"{key}=null")
    if agent.search_folder is None or not Path(agent.search_folder).is_dir():
        rule = f"the tool {SEARCH} needs a folder of texts, relative to {Path.cwd()}"
        yield ConfigError(key, agent.search_folder, rule, remedies=[without])
    elif find_spec("bm25s") is None:
        rule = f"the tool {SEARCH} needs the package bm25s, which is not installed"
        fix = f"pip install 'hybridrl[search]', or set {' '.join(without)}"
        yield ConfigError("agent.tools", list(agent.tools), rule, fix, remedies=[without])


def check_conversations_have_a_template(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Messages are appended in the form of the chat template."""
    if not config.agent.is_single_turn and not config.data.use_chat_template:
        with_template = ("data.use_chat_template=true",)
        remedies = [("agent=single_turn",)]
        # The made model has learned a chat template for one task.
        if config.model.path is not None or config.data.task == "calculator":
            remedies.insert(0, with_template)
        yield ConfigError(
            "data.use_chat_template",
            config.data.use_chat_template,
            f"agent.loop={config.agent.loop} appends messages in the form of the chat template",
            remedies=remedies,
        )


def check_conversations_have_no_experts(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The experts of a conversation's tokens come in several samples, which are not joined."""
    if not config.agent.is_single_turn and config.rollout.routed_experts:
        yield ConfigError(
            "rollout.routed_experts",
            config.rollout.routed_experts,
            f"agent.loop={config.agent.loop} samples several turns, and their experts are not kept",
            remedies=[("rollout.routed_experts=false",)],
        )


def _unknown(key: str, name: str, flaw: str, *, remedy: str) -> ConfigError:
    fix = f"correct the name, or {instruction((remedy,))}"
    return ConfigError(key, name, flaw, fix, remedies=[(remedy,)])


def _flaw_of_name(
    spelled: str, built_in: tuple[str, ...], *, kinds: tuple[type[ast.AST], ...]
) -> str:
    """Return why neither a built-in name nor a file defines it; empty if one does."""
    file, _, name = spelled.rpartition(":")
    if not file:
        return "" if name in built_in else f"is not built in; {suggest_name(name, built_in)}"
    if flaw := flaw_of_file(file):
        return flaw
    try:
        names = names_at_top_level(Path(file))
    except SyntaxError as error:
        return f"{file} is not a Python file: {error}"
    if name not in names and ANYTHING not in names:
        return f"{file} has no {name!r}; {suggest_name(name, list(names))}"
    if isinstance(names.get(name), ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        noun = "class" if ast.ClassDef in kinds else "function"
        return "" if isinstance(names[name], kinds) else f"{name} in {file} is not a {noun}"
    return ""


RULES = (
    check_agent_is_known,
    check_environment_is_known,
    check_agent_rewards_are_read,
    check_agent_has_a_command,
    check_tools_are_known,
    check_search_has_a_folder,
    check_conversations_have_a_template,
    check_conversations_have_no_experts,
)
