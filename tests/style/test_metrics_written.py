"""A metric that is declared is written: the table promises it to whoever looks at a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hybridrl
from benchmarks.source_tree import Module, read_modules
from hybridrl.metrics import DECLARATIONS
from hybridrl.workers.sharding.lifecycle import EDGES

ROOT = Path(hybridrl.__file__).parents[1]
READERS = ("hybridrl.metrics", "hybridrl.report")
MODULES = [
    module
    for module in read_modules(ROOT / "hybridrl", root=ROOT)
    if not module.name.startswith(READERS)
]
ADDERS = ("_add",)
"""Methods that write the metric that they are called with."""


def _written(module: Module) -> Iterator[ast.expr | None]:
    """Yield what a module writes to: keys of dictionaries, and arguments of ``ADDERS``."""
    for node in module.nodes:
        if isinstance(node, ast.Dict):
            yield from node.keys
        elif isinstance(node, ast.DictComp):
            yield node.key
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield node.slice
    for call in module.calls_of(*ADDERS):
        yield from call.args[:1]


def _arguments_of(*names: str) -> set[str]:
    """Return the text that functions of these names are called with first."""
    calls = (call for module in MODULES for call in module.calls_of(*names) if call.args)
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }


def _template(text: ast.JoinedStr) -> str:
    return "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in text.values)


def _keywords(name: str) -> set[str]:
    return {
        node.value.value
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.keyword)
        and node.arg == name
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def written_names() -> set[str]:
    """Names that the product writes; one with a part of any text has ``{}`` there."""
    names = {
        key.value
        for module in MODULES
        for key in _written(module)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    templates = {
        _template(node)
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.JoinedStr)
    }
    stages = {edge.name for edge in EDGES} | _arguments_of("_observe", "_stage", "clock")
    parts = {
        "{}/lr": _keywords("area"),
        "{}/grad_norm": _keywords("area"),
        "{}/updates": _keywords("area"),
        "{}/skipped_updates": _keywords("area"),
        "time/{}_s": stages,
        "time/critic_{}_s": _arguments_of("_working"),
    }
    assert parts.keys() <= templates  # a family that nobody writes any more is no family
    filled = {name.replace("{}", part) for name, words in parts.items() for part in words}
    return names | templates | filled


def test_every_declared_metric_is_written_by_the_product() -> None:
    written = written_names()
    unwritten = [name for name in DECLARATIONS if re.sub(r"{\w+}", "{}", name) not in written]
    assert unwritten == []
