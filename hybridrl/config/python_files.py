"""Names that a Python file defines, read without running it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

Names = Mapping[str, ast.AST]
"""The statement that binds each name last: a function, a class, an import, an assignment."""

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


def functions_of(names: Names) -> list[str]:
    """Return the names of the functions that the file defines itself."""
    return [name for name, node in names.items() if isinstance(node, ast.FunctionDef)]


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
        _signature_of(node.args).bind(**dict.fromkeys(keywords))
    except TypeError as err:
        how = f"with the keywords {', '.join(keywords)}" if keywords else "without arguments"
        return f"is called {how}, which it does not take: {err}"
    return ""


def required_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters without a default, but those after a single ``*``."""
    names = [arg.arg for arg in node.args.args]
    return names[: len(names) - len(node.args.defaults)]


def flaw_of_kind(node: ast.AST) -> str:
    """Return why a name cannot be a function of any kind; empty if it may be one."""
    if isinstance(node, ast.ClassDef | ast.Import):
        return f"is a {'class' if isinstance(node, ast.ClassDef) else 'module'}, not a function"
    return ""


def _signature_of(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [
        *((arg.arg, kinds.POSITIONAL_ONLY) for arg in arguments.posonlyargs),
        *((arg.arg, kinds.POSITIONAL_OR_KEYWORD) for arg in arguments.args),
    ]
    num_required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(name, kind, default=kinds.empty if at < num_required else None)
        for at, (name, kind) in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


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
