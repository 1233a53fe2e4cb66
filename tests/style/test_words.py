"""One word for one idea: what a test can hold of it."""

import ast
from collections import defaultdict
from pathlib import Path

import hybridrl
from benchmarks.source_tree import Module, read_modules

ROOT = Path(hybridrl.__file__).parents[1]
MODULES = read_modules(ROOT / "hybridrl", root=ROOT)

SAYS_NOTHING = {"found", "here", "mine", "ours", "rest", "stuff", "there", "theirs", "thing"}
SAYS_NOTHING |= {"told", "whole"}
"""Names of variables that leave open what they hold."""

REPLACED = {"Admission", "Box", "Depth", "Offer", "Packs", "Shelf", "Stretch", "Tenant", "Ticket"}
"""Names of classes for which the field has another word."""


def test_a_class_name_stands_for_one_class() -> None:
    modules_of = defaultdict(list)
    for module in MODULES:
        for one in module.classes:
            modules_of[one.name].append(module.name)
    assert {name: at for name, at in modules_of.items() if len(at) > 1} == {}


def test_a_class_bears_the_word_of_its_field() -> None:
    names = {one.name for module in MODULES for one in module.classes}
    assert names & REPLACED == set()


def test_a_variable_says_what_it_holds() -> None:
    assert [at for module in MODULES for at in _empty_names(module)] == []


def _empty_names(module: Module) -> list[str]:
    stored = [
        (node.id, node.lineno)
        for node in module.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    stored += [(node.arg, node.lineno) for node in module.nodes if isinstance(node, ast.arg)]
    return [f"{module.name}:{line} {name}" for name, line in stored if name in SAYS_NOTHING]
