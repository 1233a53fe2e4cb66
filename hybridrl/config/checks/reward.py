"""Rules about reward functions: they exist, can be called, and have the arguments that are given.

Files are read, never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import hybridrl
from hybridrl.config.checks.messages import check_numbers, error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.signatures import (
    SignatureError,
    find_name,
    flaw_of_kind,
    required_parameters,
    signature_of,
)
from hybridrl.config.reward import (
    BATCH_COLUMNS,
    BUILT_IN_REWARDS,
    ROW_COLUMNS,
    TIMEOUT,
    RewardPart,
    own_columns,
)
from hybridrl.errors import ConfigError, suggest_name

_PACKAGE = Path(hybridrl.__file__).parent / "rewards"
_OF_VERL = {"solution_str": "response", "ground_truth": "answer", "data_source": "source"}
"""Inputs of verl's reward functions, and the columns to give them. Others are columns of theirs."""

_OF_TRL = {
    **{"completions": "responses", "prompts": "prompts"},
    **dict.fromkeys(("answer", "answers", "ground_truth", "solution", "label"), "answers"),
}
"""Inputs of TRL's: the usual names of a column with the answer among them."""

_OF_SLIME = {"prompt": "prompt", "response": "response", "label": "answer"}
"""Attributes of slime's samples, and the columns to give them; ``metadata`` is one of its own."""

_OF_OPENRLHF = {
    "queries": "[p + r for p, r in zip(prompts, responses)]",
    "prompts": "prompts",
    "labels": "answers",
}
_PACKAGES = {
    "math": ("math_verify", "math", "math-verify"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym", "reasoning-gym"),
}
"""By the name of a function: module, extra and name of the package that it needs."""


def check_reward_is_one_or_several(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Either one function is given, or several with names."""
    reward, key = config.reward, "reward.function"
    if reward.function is None and not reward.functions:
        rule = "needs a function, or several in reward.functions"
        yield error(config, key, rule, f"{key}=exact_match")
    if reward.function is not None and reward.functions:
        rule = f"would be ignored, because reward.functions gives {', '.join(reward.functions)}"
        emptied = " ".join(f"~reward.functions.{name}" for name in reward.functions)
        yield error(config, key, rule, f"{key}=null", emptied)
    if (name := "kl_charge") in reward.functions:
        rule = f"reward/{name}/mean is the name of another metric"
        yield error(config, f"reward.functions.{name}", rule, fix="rename it", got="...")


def check_reward_functions(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A reward is built in, or a function in a file that can be parsed, and takes its args."""
    task = config.data.task
    for name, part in config.reward.parts.items():
        root = "reward" if config.reward.function is not None else f"reward.functions.{name}"
        flaws = list(_check_function(config, root, part))
        yield from flaws
        asked = ", ".join(own_columns(part.function))
        if asked and task is not None and config.offline is None and not flaws:
            rule = f"asks for columns that rows of data.task={task} lack: {asked}"
            fix = "name files that have them: data=files data.train_files=[FILE]"
            yield error(config, f"{root}.function", rule, fix=fix)


def _check_function(config: ExperimentConfig, root: str, part: RewardPart) -> Iterator[ConfigError]:
    key, spelled = f"{root}.function", part.function
    path, colon, name = spelled.rpartition(":")
    if colon:
        yield from _check_in_file(config, root, part, Path(path), name)
    elif spelled not in BUILT_IN_REWARDS:
        rule = "neither a built-in reward nor path/to/file.py:function"
        remedies = [f"{key}={built_in}" for built_in in tuple(BUILT_IN_REWARDS)[:2]]
        fix = suggest_name(spelled, [*BUILT_IN_REWARDS])
        if spelled.endswith(".py"):
            fix = f"name the function, too: set {key}={spelled}:NAME"
        yield error(config, key, rule, *remedies, fix=fix)
    elif spelled in _PACKAGES and find_spec(_PACKAGES[spelled][0]) is None:
        _, extra, package = _PACKAGES[spelled]
        rule = f"needs the package {package}, which is not installed"
        fix = f"pip install 'hybridrl[{extra}]', or set {key}=exact_match"
        yield error(config, key, rule, f"{key}=exact_match", fix=fix)
    else:
        file = _PACKAGE / f"{BUILT_IN_REWARDS[spelled]}.py"
        yield from _check_in_file(config, root, part, file, spelled)


def _check_in_file(
    config: ExperimentConfig, root: str, part: RewardPart, file: Path, name: str
) -> Iterator[ConfigError]:
    key = f"{root}.function"
    if file.suffix != ".py":
        yield error(config, key, f"{file} must end in .py", fix="rename the file")
        return
    try:
        node = find_name(file, name)
    except SignatureError as flaw:
        yield error(config, key, flaw.rule, fix=flaw.fix)
        return
    if node is None:
        return
    problem, line = _flaw_of(node), _line_that_calls(node)
    if not config.agent.is_single_turn:
        line = _with_all_turns(line)
    if part.function not in BUILT_IN_REWARDS and line:
        fix = f"add the line `{line}` to {file}, then set {key}={file}:scored"
        yield error(config, key, "it is a function of another framework", fix=fix)
    elif part.function not in BUILT_IN_REWARDS and problem:
        fix = f"write def {name}({', '.join(BATCH_COLUMNS[:2])}): ..., or with other columns"
        yield error(config, key, f"it {problem}", fix=fix)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        signature, columns = signature_of(node), {*BATCH_COLUMNS, *ROW_COLUMNS, TIMEOUT}
        numbers = {each: one for each, one in signature.numbers.items() if each not in columns}
        signature = replace(signature, numbers=numbers)
        yield from check_numbers(signature, part.args, function=name, section=f"{root}.args")


def _flaw_of(node: ast.AST) -> str:
    """Return why a name is not a reward function; empty if it may be one.

    Assigned, imported and decorated names are unknown before the file runs.
    """
    if flaw := flaw_of_kind(node):
        return flaw
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return ""
    if node.args.posonlyargs:
        return f"has the positional-only parameter {node.args.posonlyargs[0].arg!r}"
    names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    if node.args.kwarg is None and names.isdisjoint((*ROW_COLUMNS, *BATCH_COLUMNS)):
        return f"asks for none of {', '.join(ROW_COLUMNS)}, nor of {', '.join(BATCH_COLUMNS)}"
    of_row, of_all = ([*filter(names.__contains__, each)] for each in (ROW_COLUMNS, BATCH_COLUMNS))
    if of_row and of_all:
        return f"asks for {of_row[0]!r}, of one row, and {of_all[0]!r}, of all: choose"
    return ""


def _line_that_calls(node: ast.AST) -> str:
    """Return a function that calls one of another framework with the columns here, or nothing."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    required = required_parameters(node)
    is_async, result = isinstance(node, ast.AsyncFunctionDef), "{}"
    start, call = ("async def", "await ") if is_async else ("def", "")
    read = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    known = _OF_SLIME | dict.fromkeys(read & {"metadata"}, "metadata")
    columns, fields = ", ".join(known.values()), ", ".join(map("=".join, known.items()))
    sample = f'type("Sample", (), dict({fields}))'
    if {"args", "sample"} <= {*required}:
        given = {"args": "None", "sample": sample}
    elif {"args", "samples"} <= {*required}:  # of one prompt; a slice has several
        lists = ", ".join([*(f"{name}s" for name in _OF_SLIME.values()), *known.keys() - _OF_SLIME])
        return (
            f"{start} scored({lists}): from itertools import groupby; return [each for _, group in "
            f"groupby(zip({lists}), lambda row: row[0]) for each in {call}{node.name}(args=None, "
            f"samples=[{sample} for {columns} in group])]"
        )
    elif {"queries", "labels"} <= {*required}:
        columns, given = "prompts, responses, answers", _OF_OPENRLHF
        result = '[*map(float, ({})["rewards"])]'
    elif {"completions", "solution_str"} & {*required}:
        column_of = _OF_TRL if "completions" in required else _OF_VERL
        given = {name: column_of.get(name, name) for name in required}
        if any(arg.arg == "extra_info" for arg in node.args.args):  # verl's, often with a default
            given["extra_info"] = "extra_info"
        columns = ", ".join(dict.fromkeys(given.values()))
    else:
        return ""
    inputs = ", ".join(f"{name}={text}" for name, text in given.items())
    called = result.format(f"{call}{node.name}({inputs})")
    return f"{start} scored({columns}): return {called}"


def _with_all_turns(line: str) -> str:
    """Give slime's and verl's functions a conversation's text: ``response`` is its last turn."""
    text = '="".join(each["text"] for each in conversation)'
    given = re.sub(r"=response\b", text, line)
    return line if given == line else re.sub(r"\bresponse(s?)\b(?!=)", r"conversation\1", given)
