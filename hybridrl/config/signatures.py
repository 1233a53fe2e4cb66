"""The signature of a function in a Python file: its inputs and its numbers, read, never run.

Parameters are inputs, passed by name. Keyword-only parameters are numbers that a user may set:
``def mine(rewards_B, group_B, *, floor: Annotated[float, Within(at_least=0, at_most=1)] = 0.1)``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from hybridrl.config import limits
from hybridrl.config.python_files import ANYTHING, functions_of, names_at_top_level
from hybridrl.config.reader import Reader
from hybridrl.errors import ConfigError, suggest_name

_KINDS = {"float": float, "int": int, "bool": bool, "str": str}


class SignatureError(ValueError):
    """A function cannot be read, or has a form that nobody can call by name.

    Args:
        rule: the rule that it breaks.
        fix: the text to type instead.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}. Fix: {fix}")
        self.rule = rule
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Number:
    """One keyword-only parameter."""

    name: str
    hint: object  # a type that config/reader.py reads; None if the file names none of them
    default: object  # REQUIRED without a default


@dataclass(frozen=True, slots=True)
class Signature:
    """A function as its source shows it."""

    inputs: tuple[str, ...]
    numbers: Mapping[str, Number]
    meaning: str  # its docstring


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()
"""The default of a number that has none."""


def read_signature(file: Path, name: str) -> Signature:
    """Read the function ``name`` at the top level of ``file``.

    Raises:
        SignatureError: not a Python file, no such function, or not a function to call by name.
    """
    try:
        names = names_at_top_level(file)
    except SyntaxError as err:
        raise SignatureError(f"not a Python file: {err}", f"correct {file}") from err
    node = names.get(name)
    if not isinstance(node, ast.FunctionDef):
        if node is not None or ANYTHING in names:
            rule = f"{name} is not written as a function in {file}"
            raise SignatureError(rule, f"write it as def {name}(...): in that file")
        functions = functions_of(names)
        fix = suggest_name(name, functions) if functions else f"define it in {file}"
        raise SignatureError(f"{file} defines no function {name!r} at its top level", fix)
    parameters = node.args
    if parameters.vararg or parameters.kwarg or parameters.posonlyargs:
        rule = f"{name} has *args, **kwargs or positional-only parameters: nothing says its inputs"
        raise SignatureError(rule, "name each input; numbers come after a single *")
    return signature_of(node)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Return the inputs and numbers of a function, without its *args and **kwargs."""
    parameters = node.args
    return Signature(
        inputs=tuple(arg.arg for arg in parameters.args),
        numbers={
            arg.arg: Number(arg.arg, _hint_of(arg.annotation), _value_of(default))
            for arg, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        },
        meaning=ast.get_docstring(node) or "",
    )


def check_numbers(
    signature: Signature,
    given: Mapping[str, object],
    *,
    function: str,
    key_of: Callable[[str], str],
    removing: Callable[[str], str],
) -> list[ConfigError]:
    """Return the violations of numbers that a user gives to a function.

    Args:
        given: numbers by name.
        key_of: returns the dotted key of a number.
        removing: returns the override that takes a number back.
    """
    reader = Reader()
    names = ", ".join(signature.numbers) or "none"
    for name, value in given.items():
        number = signature.numbers.get(name)
        if number is None:
            rule = f"{function} has no such number; it has {names}"
            remedies = [(removing(name),)]
            reader.violations.append(ConfigError(key_of(name), value, rule, remedies=remedies))
        elif number.hint is not None:
            reader.read(number.hint, value, key_of(name))
    for name, number in signature.numbers.items():
        if number.default is REQUIRED and name not in given:
            rule = f"{function} needs it and has no default"
            fix = f"set {key_of(name)}=VALUE"
            reader.violations.append(ConfigError(key_of(name), None, rule, fix))
    return reader.violations


def _hint_of(node: ast.expr | None) -> object:
    """Return the type that an annotation names; None for one that no configuration reads."""
    match node:
        case ast.Name(id=name) if name in _KINDS:
            return _KINDS[name]
        case ast.Name(id=name):
            return vars(limits).get(name)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return Literal[tuple(_value_of(value) for value in values)]
        case ast.Subscript(
            value=ast.Name(id="Annotated"),
            slice=ast.Tuple(elts=[ast.Name(id=kind), ast.Call(func=ast.Name(id="Within")) as call]),
        ) if kind in _KINDS:
            ends = {word.arg: _value_of(word.value) for word in call.keywords if word.arg}
            return Annotated[_KINDS[kind], limits.Within(**ends)]  # type: ignore[arg-type]
    return None


def _value_of(node: ast.expr | None) -> object:
    """Return a literal; None for anything else."""
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
