"""One word for one idea: what a test can hold of it."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
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

PRIVATE = re.compile(
    r"\b(stretch(es|ed)?|box(es)?|siblings?|tells?|told|mend(s|ed)?|tenants?|leads|packs?|whole|"
    r"bit by bit|torn|go(es)? on|anew|whoever)\b",
    re.IGNORECASE,
)
"""Words that stood for ideas with a better known name: span, range, group, offload, restart ..."""

NO_NOUN = re.compile(r'"""(Return |Say |Tell |Name |Find )?[Ww]hat\b')
"""A docstring that begins so describes a thing without naming it."""

FIELD_WORDS = {".torn": "a suffix on disk", ".pack(": "of struct", "box=None": "of rich"}
FIELD_WORDS |= {
    "_file.tell()": "of files",
    "def pack(": "of buffers",
    "Whole": "not split",
    "WHOLE": "",
}
"""Texts that may hold such a word, and why."""


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


def test_texts_use_the_words_of_the_field() -> None:
    assert [at for at, line in _plain_lines() if PRIVATE.search(line)] == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    lines = ((module.name, line) for module in MODULES for line in module.text.splitlines())
    assert [f"{name}: {line.strip()}" for name, line in lines if NO_NOUN.search(line)] == []


def _plain_lines() -> Iterator[tuple[str, str]]:
    """Yield the lines of all modules, with comments, without words of the field."""
    for module in MODULES:
        for number, line in enumerate(module.text.splitlines(), 1):
            for text in FIELD_WORDS:
                line = line.replace(text, "")
            yield f"{module.name}:{number} {line.strip()}", line


def _empty_names(module: Module) -> list[str]:
    stored = [
        (node.id, node.lineno)
        for node in module.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    stored += [(node.arg, node.lineno) for node in module.nodes if isinstance(node, ast.arg)]
    return [f"{module.name}:{line} {name}" for name, line in stored if name in SAYS_NOTHING]
