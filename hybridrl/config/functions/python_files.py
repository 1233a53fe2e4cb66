"""Names that a Python file defines, and headers of its functions, read without running it.

A file of the user's may import torch, which takes seconds; the checks of a command take one.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.functions.paths import flaw_of_file
from hybridrl.errors import suggest_name

Names = Mapping[str, ast.AST]
"""The statement that binds each name last: a function, a class, an import, an assignment."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

ANYTHING = "*"
"""Bound by ``from module import *``: then any name may exist."""


def names_at_top_level(file: Path) -> Names:
    """Return all names of the module after an import of ``file``, as far as the source shows.

    Names within if, try, with and loops count, too.

    Raises:
        SyntaxError: it is not a Python file, or cannot be read; its text gives the reason.
    """
    try:
        # As bytes: the first line may say that the file is not in UTF-8.
        body = ast.parse(file.read_bytes(), str(file)).body
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)  # 'return' outside etc.
    except (ValueError, RecursionError, MemoryError, OSError) as err:
        raise SyntaxError(str(err) or "it is nested too deep") from err
    return dict(binding for node in body for binding in _bindings(node))


class SignatureError(ValueError):
    """A function cannot be read, or has a form that nobody can call by name."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}. Fix: {fix}")
        self.rule = rule
        self.fix = fix


def find_name(file: str | Path, name: str) -> ast.AST | None:
    """Return the statement that binds ``name`` in a file; None where the source does not show it.

    Raises:
        SignatureError: there is no such file, it is not Python, or it does not define the name.
    """
    if flaw := flaw_of_file(file):
        raise SignatureError(flaw, "correct it; the form is path/to/file.py:function")
    try:
        names = names_at_top_level(Path(file))
    except SyntaxError as err:
        raise SignatureError(f"{file} is not a Python file: {err}", "correct it") from err
    if name in names or ANYTHING in names:
        return names.get(name)
    defined = [name for name, node in names.items() if isinstance(node, Function | ast.ClassDef)]
    fix = suggest_name(name, defined) if defined else f"define it in {file}"
    raise SignatureError(f"{file} defines no {name!r} at its top level", fix)


def flaw_of_function(node: ast.AST, *, keywords: Collection[str]) -> str:
    """Return why a name is not a function to call with ``keywords``; empty if it may be one.

    Assigned, imported and decorated names are unknown before the file runs.
    """
    if isinstance(node, ast.AsyncFunctionDef):
        return "is asynchronous, and nobody would await it"
    if flaw := flaw_of_kind(node):
        return flaw
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return ""
    try:
        header_of(node).bind(**dict.fromkeys(keywords))
    except TypeError as err:
        how = f"with the keywords {', '.join(keywords)}" if keywords else "without arguments"
        return f"is called {how}, which it does not take: {err}"
    return ""


def flaw_of_kind(node: ast.AST) -> str:
    """Return why a name cannot be a function of any kind; empty if it may be one."""
    if isinstance(node, ast.ClassDef | ast.Import):
        return f"is a {'class' if isinstance(node, ast.ClassDef) else 'module'}, not a function"
    return ""


def header_of(node: Function) -> inspect.Signature:
    """Return the signature of a function: literal defaults, and annotations as texts.

    Python itself runs ``def name(...): pass`` with None for each default that is no literal.
    """
    arguments = copy.deepcopy(node.args)
    arguments.defaults = [_literal(default) for default in arguments.defaults]
    arguments.kw_defaults = [default and _literal(default) for default in arguments.kw_defaults]
    header = f"def function({ast.unparse(arguments)}): pass"
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{header}", namespace)
    return inspect.signature(namespace["function"])


def required_parameters(node: Function) -> list[str]:
    """Return the parameters without a default, but those after a single ``*``."""
    kinds = inspect.Parameter
    return [
        parameter.name
        for parameter in header_of(node).parameters.values()
        if parameter.kind is kinds.POSITIONAL_OR_KEYWORD and parameter.default is kinds.empty
    ]


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(None)
    return default


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
