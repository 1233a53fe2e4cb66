"""The signature of a function in a Python file: its inputs and its numbers, read, never run.

Parameters are inputs, passed by name. Keyword-only parameters are numbers that a user may set:
``def mine(rewards_B, group_B, *, floor: Annotated[float, Field(ge=0, le=1)] = 0.1)``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_origin

from pydantic import Field

from hybridrl.config import limits
from hybridrl.config.functions.python_files import Function, SignatureError, find_name, header_of
from hybridrl.config.values import errors_of_value
from hybridrl.errors import ConfigError

REQUIRED = inspect.Parameter.empty
"""The default of a number that has none."""

_TYPES = {
    **{name: value for name, value in vars(limits).items() if get_origin(value)},
    **{"float": float, "int": int, "bool": bool, "str": str},
    **{"Annotated": Annotated, "Literal": Literal, "Field": Field, "__builtins__": {}},
}
"""Names that the annotation of a number may use."""


@dataclass(frozen=True, slots=True)
class Number:
    """One keyword-only parameter."""

    name: str
    hint: object  # None for an annotation that no configuration reads
    default: object  # REQUIRED without a default


@dataclass(frozen=True, slots=True)
class Signature:
    """A function as its source shows it."""

    inputs: tuple[str, ...]
    numbers: Mapping[str, Number]
    meaning: str  # its docstring


def read_signature(file: Path, name: str) -> Signature:
    """Read the function ``name`` at the top level of ``file``.

    Raises:
        SignatureError: not a Python file, no such function, or not a function to call by name.
    """
    node = find_name(file, name)
    if not isinstance(node, ast.FunctionDef):
        rule = f"{name} is not written as a function in {file}"
        raise SignatureError(rule, f"write it as def {name}(...): in that file")
    if node.args.vararg or node.args.kwarg or node.args.posonlyargs:
        rule = f"{name} has *args, **kwargs or positional-only parameters: nothing says its inputs"
        raise SignatureError(rule, "name each input; numbers come after a single *")
    return signature_of(node)


def signature_of(node: Function) -> Signature:
    """Return the inputs and numbers of a function, without its *args and **kwargs."""
    kinds = inspect.Parameter
    parameters = header_of(node).parameters.values()
    return Signature(
        inputs=tuple(one.name for one in parameters if one.kind is kinds.POSITIONAL_OR_KEYWORD),
        numbers={
            one.name: Number(one.name, _hint_of(one.annotation), one.default)
            for one in parameters
            if one.kind is kinds.KEYWORD_ONLY
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

    ``key_of`` returns the dotted key of a number, ``removing`` the override that takes it back.
    """
    errors: list[ConfigError] = []
    for name, value in given.items():
        number = signature.numbers.get(name)
        if number is None:
            rule = f"{function} has no such number; it has {', '.join(signature.numbers) or 'none'}"
            errors.append(ConfigError(key_of(name), value, rule, remedies=[(removing(name),)]))
        elif number.hint is not None:
            errors += errors_of_value(number.hint, value, key_of(name))
    for name, number in signature.numbers.items():
        if number.default is REQUIRED and name not in given:
            rule = f"{function} needs it and has no default"
            errors.append(ConfigError(key_of(name), None, rule, f"set {key_of(name)}=VALUE"))
    return errors


def _hint_of(annotation: object) -> object:
    """Return the type that an annotation spells; None for one that no configuration reads."""
    try:
        hint: object = eval(str(annotation), dict(_TYPES))
    except (NameError, SyntaxError, TypeError, AttributeError, ValueError):  # the file's own names
        return None
    return None if isinstance(hint, str) else hint
