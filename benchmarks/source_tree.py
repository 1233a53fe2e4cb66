"""What can be read off the syntax trees of a package: sizes, imports, habits."""

from __future__ import annotations

import ast
import gc
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Module:
    """One source file, parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return walk(self.tree)

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> set[str]:
        """Dotted names that the module imports, wherever in the file."""
        return set(imported_names(self.tree))

    @property
    def num_comment_lines(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)

    @property
    def num_docstring_lines(self) -> int:
        """Lines of docstrings, those under fields included."""
        return sum(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions or methods with one of these names."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and called(node) in names]


@cache
def read_modules(folder: Path, *, root: Path) -> list[Module]:
    """Parse every ``.py`` file under ``folder``, once; names are relative to ``root``."""
    modules = []
    gc.disable()  # nothing here is garbage, and to look for it doubles the time
    try:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            text = path.read_text(encoding="utf-8")
            name = ".".join(part for part in parts if part != "__init__")
            modules.append(Module(name, path, text, ast.parse(text)))
    finally:
        gc.enable()
    return modules


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return what ``ast.walk`` yields, in a third of the time."""
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield what ``tree`` imports: ``a.b`` for ``import a.b``, ``a.b`` and ``a.b.c`` for
    ``from a.b import c``, since ``c`` may be a module.
    """
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(call: ast.Call) -> str:
    """Return the bare name that is called: ``release`` for ``self.engine.release(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def num_lines(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(function: Function) -> tuple[int, int]:
    """Return how many parameters there are, and how many are positional; self is none."""
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    num_positional = len(positional) - (positional[:1] in (["self"], ["cls"]))
    return num_positional + len(args.kwonlyargs), num_positional


def nesting(node: ast.AST) -> int:
    """Return the depth of blocks inside ``node``; ``elif`` adds none."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # which holds no block
            continue
        is_elif = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
        opens = isinstance(child, _BLOCKS) and not is_elif
        deepest = max(deepest, opens + nesting(child))
    return deepest


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    names = {module.name for module in modules}
    graph = {module.name: sorted(module.imports & names - {module.name}) for module in modules}
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in graph
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph[name])
    return seen


def duplicates(modules: list[Module], *, min_lines: int) -> list[tuple[str, str]]:
    """Return pairs of functions that are equal but for their name, from ``min_lines`` lines on."""
    seen: dict[str, str] = {}
    pairs = []
    for module in modules:
        for function in module.functions:
            if num_lines(function) < min_lines:
                continue
            body = "\n".join(ast.dump(statement) for statement in function.body)
            here = f"{module.name}.{function.name}"
            if body in seen:
                pairs.append((seen[body], here))
            seen.setdefault(body, here)
    return pairs


def swallows(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler takes any exception and neither raises nor hands it on."""
    names = ast.unparse(handler.type) if handler.type else "BaseException"
    if names not in ("Exception", "BaseException"):
        return False
    nodes = [node for statement in handler.body for node in ast.walk(statement)]
    is_used = any(isinstance(node, ast.Name) and node.id == handler.name for node in nodes)
    return not is_used and not any(isinstance(node, ast.Raise) for node in nodes)
