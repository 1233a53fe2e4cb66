"""Reads what a user types for another framework: shell scripts, Python with a config, YAML."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml

_ARRAY = re.compile(
    r"^[ \t]*(\w+)\+?=\((?:[ \t]*\n(.*?)^[ \t]*\)|([^\n]*)\)[ \t]*$)", re.MULTILINE | re.DOTALL
)
_SCALAR = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)=((?!\()[^\n]*)$", re.MULTILINE)
_TEST = re.compile(r"\s*if \[\[? \"?\$\{?(\w+)\}?\"? ==? \"?(\w*)\"? \]\]?; *then *$")
_BRANCH = re.compile(r"\s*(if|elif|else|fi)\b(?!.*\bfi\s*$)")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?\w+=(?:\"[^\"]*\"|'[^']*')\s*")
_SUM = re.compile(r"\$\(\(((?:[^()$]|\([^()$]*\))*)\)\)")
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", re.DOTALL)
_FROM_ELSEWHERE = re.compile(r"\$\{\w+\[@\]\}|\$@")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-([^}]*))?\}|\$(\w+)")
_PARTS_OF_TRAINER = ("reward_funcs", "environment_factory", "tools", "rollout_func")
_MOST_EXPANSIONS = 10
_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
"""Of a shell's numbers, which are integers."""


@dataclass(frozen=True, slots=True)
class Typed:
    """One key of a command."""

    key: str
    """As it was typed."""

    value: str

    former: str = ""
    """The name of the key in earlier versions of the framework; empty: the same."""

    @property
    def name(self) -> str:
        """The key without dashes: flags have underscores."""
        if self.former:
            return self.former
        name = self.key.lstrip("+~")
        return name.removeprefix("--").replace("-", "_") if name.startswith("--") else name

    @property
    def shown(self) -> str:
        """The value, as it stood behind the key."""
        return f" {self.value}" if self.key.startswith("--") else f"={self.value}"


def read_script(text: str, *, suffix: str) -> list[Typed]:
    """Return the keys of a script, in their order; all but ``.py`` and ``.yaml`` is of a shell.

    Raises:
        SyntaxError, YAMLError: it is not Python, or not YAML.
        ValueError: a quote of a shell script is not closed.
    """
    if suffix == ".py":
        return list(_of_python(text))
    if suffix in (".yaml", ".yml"):
        values = yaml.safe_load(text)
        return list(_of_mapping(values)) if isinstance(values, dict) else []
    return list(_of_words(_words_of(text)))


def _of_python(text: str) -> Iterator[Typed]:
    """Yield the arguments of ``GRPOConfig(...)``, and the parts of ``GRPOTrainer``.

    An argument of the script, ``args.NAME``, is what its ``add_argument`` has as default.
    """
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    defaults = {
        "args." + str(call.args[0].value).lstrip("-").replace("-", "_"): keyword.value
        for call in calls
        if ast.unparse(call.func).endswith("add_argument")
        and call.args
        and isinstance(call.args[0], ast.Constant)
        for keyword in call.keywords
        if keyword.arg == "default"
    }
    for node in calls:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "load_dataset" and node.args and isinstance(node.args[0], ast.Constant):
            yield Typed("dataset_name", str(node.args[0].value))
        for keyword in node.keywords:
            if name.endswith("Trainer") and keyword.arg in _PARTS_OF_TRAINER:
                yield Typed(keyword.arg, ast.unparse(keyword.value).replace("$", ""))
                continue
            is_model = name.endswith("Trainer") and keyword.arg == "model"
            if keyword.arg is None or not (name.endswith("Config") or is_model):
                continue
            try:
                value = ast.literal_eval(defaults.get(ast.unparse(keyword.value), keyword.value))
            except ValueError:
                value = f"$({ast.unparse(keyword.value)})"
            yield Typed(keyword.arg, str(value))


def _of_mapping(values: Mapping[str, Any], prefix: str = "") -> Iterator[Typed]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _of_mapping(value, f"{prefix}{name}.")
        else:
            yield Typed(f"{prefix}{name}", str(value))


def _words_of(text: str) -> list[str]:
    """Return the words of the command with the most keys, its variables in their places."""
    text = re.sub(r"\\\n", " ", re.sub(r"(^|\s)#[^\n]*", r"\1", text))
    text = _QUOTED.sub(lambda quoted: quoted[0].replace("\n", " "), text)  # a line has all of it
    variables = {
        m[1]: (m[2] or m[3] or "").replace("\n", " ").strip() for m in _ARRAY.finditer(text)
    }
    commands = _without_branches(_ARRAY.sub("", text))
    for name, value in _SCALAR.findall(commands):
        own_default = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", value.strip().strip("\"'"))
        before = variables.get(name, "").strip().strip("\"'")  # a variable may be appended to
        longer = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", lambda _: before, value)  # noqa: B023
        variables[name] = own_default[1] if own_default else longer
    variables = {
        name: value if "--" in value else value.strip().strip("\"'")
        for name, value in variables.items()
    }
    lines = [line for line in commands.splitlines() if not _ASSIGNMENT.fullmatch(line)]
    line = max(lines, key=partial(_num_keys, variables=variables), default="")
    words = shlex.split(_expanded(line, variables))
    inner = max(words, key=partial(_num_keys, variables={}), default="")
    if _num_keys(inner, {}) > 1:  # bash -c "..."
        words = shlex.split(inner)
    words = [word for word in words if not _FROM_ELSEWHERE.fullmatch(word)]  # of a sourced file
    launched = [n for n, word in enumerate(words) if re.fullmatch(r"(\S*/)?python[\d.]*", word)]
    if not launched and "--" in words:
        return words[words.index("--") + 1 :]
    return words[launched[0] :] if launched else words  # behind srun and its flags


def _without_branches(text: str) -> str:
    """Leave out branches of ``if [[ $NAME == VALUE ]]`` that are known not to be taken."""
    values: dict[str, str] = {}
    taken: list[bool | None] = []  # of the open ifs; None: not known
    kept = []
    for line in text.splitlines():
        word = _BRANCH.match(line)
        if word is None and False not in taken:
            kept.append(line)
            if (scalar := _SCALAR.match(line)) and "$" not in scalar[2]:
                values[scalar[1]] = scalar[2].strip().strip("\"'")
        elif word and (word[1] == "if" or taken):
            _branch(word[1], line, values, taken)
    return "\n".join(kept)


def _branch(word: str, line: str, values: Mapping[str, str], taken: list[bool | None]) -> None:
    if word == "if":
        test = _TEST.match(line)
        known = values.get(test[1]) if test else None
        taken.append(None if test is None or known is None else known == test[2])
    elif word == "fi":
        taken.pop()
    elif word == "elif":
        taken[-1] = False if taken[-1] else None
    else:
        taken[-1] = None if taken[-1] is None else not taken[-1]


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    for _ in range(_MOST_EXPANSIONS):
        # An array in quotes is several words.
        before, line = line, re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line)
        line = _SUM.sub(lambda match: _sum_of(match[1], variables), _VARIABLE.sub(value, line))
        if line == before:
            break
    return line


def _sum_of(text: str, variables: Mapping[str, str]) -> str:
    """Return the value of a shell's ``$((...))`` of numbers and known names; else the text."""
    text = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), text)
    text = _SUM.sub(lambda match: _sum_of(match[1], variables), text)
    try:
        return str(_integer(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError):
        return f"$(({text}))"


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_integer(left), _integer(right))
    raise ValueError("not a sum of numbers")


def _num_keys(line: str, variables: Mapping[str, str]) -> int:
    """Count what may be keys; a line may be part of a text over several ones, and in quotes."""
    words = _expanded(line, variables).split()
    return sum(bool(re.match(r"--\w|[+~]*\w+(\.\w+)+=", word)) for word in words)


def _of_words(words: list[str]) -> Iterator[Typed]:
    """Yield ``KEY=VALUE``, ``--key=value``, ``--key value ...`` and ``--flag``."""
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        key, equals, value = word.partition("=")
        if word.startswith("--") and not equals:
            values: list[str] = []
            while index < len(words) and not words[index].startswith("--"):
                if words[index].endswith(".py") and values:
                    break  # the program, behind the flags of what starts it
                values.append(words[index])
                index += 1
            yield Typed(word, " ".join(values) or "true")
        elif word.endswith("train_async.py"):  # slime's program that samples a step ahead
            yield Typed("train_async", "true")
        elif equals and re.fullmatch(r"--[\w.-]+|[+~]*\w+(\.\w+)+", key):
            yield Typed(key, value)
