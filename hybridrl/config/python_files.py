"""What a Python file defines, found without running it."""

from __future__ import annotations

import ast
from pathlib import Path


def functions_at_top_level(file: Path) -> list[str]:
    """Return the names of functions that ``file`` defines.

    Raises:
        SyntaxError: it is no Python file.
        UnicodeDecodeError: likewise.
        OSError: it cannot be read.
    """
    return [node.name for node in _body(file) if isinstance(node, ast.FunctionDef)]


def names_at_top_level(file: Path) -> list[str]:
    """Return functions, classes, bound and imported names: all that could be called.

    ``*`` is among them where the file imports everything of another.

    Raises:
        SyntaxError: it is no Python file.
        UnicodeDecodeError: likewise.
        OSError: it cannot be read.
    """
    body = _body(file)
    bound = [
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    imported = [
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return [*functions_at_top_level(file), *classes, *bound, *imported]


def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body
