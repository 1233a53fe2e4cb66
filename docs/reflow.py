"""Breaks Markdown lines at 120 characters: ``make format`` runs it over README.md and docs/.

A paragraph or list item with a longer line is filled anew; a table with a longer row becomes a
list. Code blocks, headings and pages that a command writes stay as they are.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH = 120
ROOT = Path(__file__).parents[1]
WRITTEN_BY_COMMANDS = ("figures.md", "gpu-results.md", "metrics.md")

_ITEM = re.compile(r"(\s*)((?:[-*]|\d+\.) +)")
_VERBATIM = re.compile(r"#|<!--|!\[|---$|\s*$")
_LOOKS_LIKE_A_MARK = re.compile(r" (?=(?:[-+*>|]|#+|\d+\.)(?: |$))")
_KEEP = "\0"


def main() -> None:
    """Rewrite the files that are named, or all."""
    named = [Path(name) for name in sys.argv[1:]]
    for page in named or pages():
        text = page.read_text(encoding="utf-8")
        if (filled := reflow(text)) != text:
            page.write_text(filled, encoding="utf-8")


def pages() -> list[Path]:
    """Return the pages that people write."""
    at_the_top = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
    written = [*at_the_top, *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in written if page.name not in WRITTEN_BY_COMMANDS]


def reflow(text: str) -> str:
    """Return ``text`` with lines of at most `WIDTH` characters, where they can be broken."""
    lines: list[str] = []
    for block in _blocks(text.splitlines()):
        if all(len(line) <= WIDTH for line in block) or _is_verbatim(block[0]):
            lines += block
        elif block[0].startswith("|"):
            lines += _list_of(block)
        else:
            item = _ITEM.match(block[0])
            mark = item[0] if item else ""
            words = " ".join(line.strip() for line in [block[0][len(mark) :], *block[1:]])
            lines += _fill(words, len(mark), mark)
    return "\n".join(lines) + "\n"


def too_long(text: str) -> list[str]:
    """Return the lines that are longer than `WIDTH` although they could be broken."""
    figures = re.sub(r"<!-- figures .*?<!-- end of figures -->", "", text, flags=re.DOTALL)
    return [
        line
        for line in figures.splitlines()
        if len(line) > WIDTH and len(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line).split()) > 1
    ]


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Group lines: a code block, a table, a list item, a paragraph, or a line by itself."""
    block: list[str] = []
    end = ""  # of the code block or figures that the present line lies in
    for line in lines:
        if end:
            block.append(line)
            end = "" if line.startswith(end) else end
            continue
        if not (block and _continues(block, line)):
            if block:
                yield block
            block = []
        block.append(line)
        if line.startswith("```"):
            end = "```"
        elif line.startswith("<!-- figures"):
            end = "<!-- end of figures"
    if block:
        yield block


def _continues(block: Sequence[str], line: str) -> bool:
    """Whether ``line`` belongs to the paragraph, item or table that has begun."""
    if _is_verbatim(block[0]) or _is_verbatim(line):
        return False
    if block[0].startswith("|") or line.startswith("|"):
        return block[0].startswith("|") and line.startswith("|")
    return _ITEM.match(line) is None


def _is_verbatim(line: str) -> bool:
    return line.startswith("```") or _VERBATIM.match(line) is not None


def _fill(text: str, indent: int, first: str = "") -> list[str]:
    filled = textwrap.wrap(
        _LOOKS_LIKE_A_MARK.sub(_KEEP, text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_KEEP, " ") for line in filled]


def _list_of(rows: Sequence[str]) -> Iterator[str]:
    """Turn a table into a list: the first column names an item, the others follow it."""
    head, _, *body = ([cell.strip() for cell in _cells(row)] for row in rows)
    for cell, *values in body:
        name = re.sub(r" \*$", r" \\*", cell)  # the mark of a note, which would end the bold type
        if len(values) == 1:
            yield from _fill(f"**{name}**: {values[0]}" if name else values[0], 2, "- ")
            continue
        yield from _fill(f"**{name}**", 2, "- ")
        for title, value in zip(head[1:], values, strict=True):
            if value:
                yield from _fill(f"{title}: {value}" if title else value, 4, "  - ")


def _cells(row: str) -> list[str]:
    return re.split(r"(?<!\\)\|", row.strip().strip("|"))


if __name__ == "__main__":
    main()
