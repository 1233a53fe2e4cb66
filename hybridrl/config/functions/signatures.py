"""The signature of a function in a Python file: its inputs and its numbers, read, never run.

Parameters are inputs, passed by name. Keyword-only parameters are numbers that a user may set:
``def mine(rewards_B, group_B, *, floor: Annotated[float, Field(ge=0, le=1)] = 0.1)``.
A file of the user's may import torch, which takes seconds; the checks of a command take one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_origin

from pydantic import Field

from hybridrl.config import limits
from hybridrl.config.functions.paths import flaw_of_file
from hybridrl.errors import suggest_name

REQUIRED = inspect.Parameter.empty
"""The default of a number that has none."""

_TYPES = {
    **{name: value for name, value in vars(limits).items() if get_origin(value)},
    **{"float": float, "int": int, "bool": bool, "str": str},
    **{"Annotated": Annotated, "Literal": Literal, "Field": Field, "__builtins__": {}},
}
"""Names that the annotation of a number may use."""


Names = Mapping[str, ast.AST]
"""The statement that binds each name last: a function, a class, an import, an assignment."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_at_top_level(file: Path) -> Names:
    """Return all names of the module after an import of ``file``, as far as the source shows.

    Names within if, try, with and loops count, too. What cannot be read is a ``SyntaxError``, too.
    """
    try:
        # As bytes: the first line may say that the file is not in UTF-8.
        module = ast.parse(file.read_bytes(), str(file))
        compile(module, str(file), "exec", dont_inherit=True)  # 'return' outside a function etc.
    except (ValueError, RecursionError, MemoryError, OSError) as err:
        raise SyntaxError(str(err) or "it is nested too deep") from err
    return dict(binding for node in module.body for binding in _bindings(node))


class SignatureError(ValueError):
    """A function cannot be read, or has a form that nobody can call by name."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}. Fix: {fix}")
        self.rule = rule
        self.fix = fix


def find_name(file: str | Path, name: str) -> ast.AST | None:
    """Return the statement that binds ``name`` in a file; None where the source does not show it.

    A ``SignatureError`` says why there is none.
    """
    if flaw := flaw_of_file(file):
        raise SignatureError(flaw, "correct it; the form is path/to/file.py:function")
    try:
        names = names_at_top_level(Path(file))
    except SyntaxError as err:
        raise SignatureError(f"{file} is not a Python file: {err}", "correct it") from err
    if name in names or "*" in names:  # after ``from module import *`` any name may exist
        return names.get(name)
    defined = [name for name, node in names.items() if isinstance(node, Function | ast.ClassDef)]
    fix = suggest_name(name, defined) if defined else f"define it in {file}"
    raise SignatureError(f"{file} defines no {name!r} at its top level", fix)


def flaw_of_kind(node: ast.AST) -> str:
    """Return why a name cannot be a function of any kind; empty if it may be one."""
    if isinstance(node, ast.ClassDef | ast.Import):
        return f"is a {'class' if isinstance(node, ast.ClassDef) else 'module'}, not a function"
    return ""


def required_parameters(node: Function) -> list[str]:
    """Return the parameters without a default, but those after a single ``*``."""
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    return names[: len(names) - len(node.args.defaults)]


def flaw_of_function(node: ast.AST) -> str:
    """Return why a name is not a function to call without arguments; empty if it may be one.

    Assigned, imported and decorated names are unknown before the file runs.
    """
    if isinstance(node, ast.AsyncFunctionDef):
        return "is asynchronous, and nobody would await it"
    if flaw := flaw_of_kind(node):
        return flaw
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return ""
    missing = [*required_parameters(node), *signature_of(node).required]
    return f"is called without arguments, and needs {', '.join(missing)}" if missing else ""


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

    @property
    def required(self) -> list[str]:
        """The numbers without a default."""
        return [name for name, number in self.numbers.items() if number.default is REQUIRED]


def read_signature(file: Path, name: str) -> Signature:
    """Read the function ``name`` at the top level of ``file``, or raise a ``SignatureError``."""
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
    return Signature(
        inputs=tuple(one.arg for one in node.args.args),
        numbers={
            one.arg: Number(one.arg, _hint_of(one.annotation), _default_of(default))
            for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        },
        meaning=ast.get_docstring(node) or "",
    )


def _default_of(default: ast.expr | None) -> object:
    """Return a literal default; None for one that is known only when the file runs."""
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def _hint_of(annotation: ast.expr | None) -> object:
    """Return the type that an annotation spells; None for one that no configuration reads."""
    try:
        hint: object = annotation and eval(ast.unparse(annotation), dict(_TYPES))
    except (NameError, SyntaxError, TypeError, AttributeError, ValueError):  # the file's own names
        return None
    return None if isinstance(hint, str) else hint


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a statement binds, also inside it, but not inside an inner scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, node) for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node
    elif not isinstance(node, ast.Lambda):
        for part in ast.iter_child_nodes(node):
            yield from _bindings(part)
