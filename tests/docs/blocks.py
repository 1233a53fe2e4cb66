"""Fenced blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hybridrl

ROOT = Path(hybridrl.__file__).parents[1]
AT_THE_TOP = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
PAGES = [*AT_THE_TOP, *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`(python -m hybridrl\.\w+[^`]*|make [^`]+)`")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python |make |pip install|pytest |recipes/)")
_SHELLS = ("bash", "")


@dataclass(frozen=True, kw_only=True)
class Block:
    page: str
    """Path of the page, relative to the repository."""

    language: str

    title: str
    """File that the block is, or is quoted from; empty if it is neither."""

    text: str


def blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page: Path) -> Iterator[Block]:
    name = str(page.relative_to(ROOT))
    for language, title, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield Block(page=name, language=language, title=title, text=text)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a page: lines of shell blocks, and inline code."""
    for block in blocks_of(page):
        if block.language in _SHELLS:
            for line in block.text.replace("\\\n", " ").splitlines():
                if _COMMAND.match(line):
                    yield shlex.split(line, comments=True)
    for command in _INLINE.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield shlex.split(command, comments=True)
