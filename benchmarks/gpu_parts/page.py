"""Results as Markdown: a table of figures against goals, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.gpu_parts.bench import Part
from benchmarks.gpu_parts.goals import GOALS
from benchmarks.gpu_parts.result import PASSED, Result, read_results
from benchmarks.gpu_parts.several import SEVERAL

_HEAD = """# What a GPU has to show

Written by `python benchmarks/gpu.py --write-docs` from the files in `docs/gpu-results/`, one a
part, each by the run that its row names. What no run has shown is **unproved**; nothing here is a
guess. How to run it: [running on a GPU](gpu.md); one part: `python benchmarks/gpu.py PART`.

"""


def goals_table(results: Mapping[str, Result]) -> str:
    """Return a row a goal: figure, limit, state, and which run says so."""
    lines = [
        "| what | goal | measured | state | part |",
        "|---|---:|---:|---|---|",
    ]
    for goal in GOALS:
        result = results.get(goal.part)
        measured = ""
        if result is not None and not result.is_dry and goal.figure in result.figures:
            measured = spell(*result.figures[goal.figure])
        state = goal.state(results)
        lines.append(f"| {goal.text} | {goal.rule} | {measured} | {state} | `{goal.part}` |")
    return "\n".join(lines) + "\n"


def parts_table(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return a row a part: when, on what, and how it ended."""
    lines = [
        "| part | shows | state | date | commit | machine | s |",
        "|---|---|---|---|---|---|---:|",
    ]
    for part in parts:
        result = results.get(part.name)
        if result is None or result.is_dry:
            lines.append(f"| {part.name} | {part.title} | unproved | | | | |")
            continue
        state = result.status
        if result.status != PASSED:
            state += f": {_first_line(result.error)}"
        device = result.machine.get("device", "")
        lines.append(
            f"| {part.name} | {part.title} | {state} | {result.date} | {result.commit} | {device} "
            f"| {result.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def figures_table(results: Mapping[str, Result]) -> str:
    """Return every figure of every part."""
    lines = ["| part | figure | value |", "|---|---|---:|"]
    lines += [
        f"| {result.part} | {name} | {spell(*value)} |"
        for result in results.values()
        for name, value in result.figures.items()
    ]
    return "\n".join(lines) + "\n"


def summary(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return what a run prints at its end."""
    sections = [parts_table(parts, results), goals_table(results), figures_table(results)]
    for result in results.values():
        sections += [f"not exercised, {result.part}: {text}\n" for text in result.not_exercised]
        if result.error:
            sections.append(f"{result.part} {result.status}: {result.error}\n")
    return "\n".join(sections)


def document(parts: Iterable[Part], results: Mapping[str, Result]) -> str:
    """Return the whole of docs/gpu-results.md."""
    real = {name: result for name, result in results.items() if not result.is_dry}
    pieces = [
        _HEAD,
        "## Goals\n\n",
        goals_table(real),
        "\n## Parts\n\n",
        parts_table(parts, real),
        "\n## Several GPUs\n\n",
        "No part measures these yet; tests marked `gpus(n)` are skipped with fewer devices.\n\n",
        "| what | state |\n|---|---|\n",
        *(f"| {text} | unproved |\n" for text in SEVERAL),
    ]
    if real:
        pieces += ["\n## Figures\n\n", figures_table(real), "\n## Machines\n\n", _machines(real)]
        pieces += ["\n## Notes\n\n", _notes(real)]
    return "".join(pieces)


def write_document(parts: Iterable[Part], kept: Path, page: Path) -> None:
    """Write the page from the folder of kept results."""
    page.write_text(document(parts, read_results(kept)), encoding="utf-8")


def spell(value: float | str, unit: str) -> str:
    """Spell a number with its unit, four digits at most."""
    if unit == "yes":
        return "yes" if float(value) >= 1 else "no"
    if unit == "bytes":
        return f"{float(value) / 1e6:,.1f} MB"
    number = f"{float(value):,.0f}" if abs(float(value)) >= 1000 else f"{float(value):.4g}"
    return number if unit == "1" else f"{number} {unit}"


def _machines(results: Mapping[str, Result]) -> str:
    texts = {", ".join(f"{k} {v}" for k, v in r.machine.items()) for r in results.values()}
    return "".join(f"- {text}\n" for text in sorted(texts))


def _notes(results: Mapping[str, Result]) -> str:
    return "".join(f"- {r.part}: {note}\n" for r in results.values() for note in r.notes)


def _first_line(text: str) -> str:
    line = text.partition("\n")[0].replace("|", "/")
    return line[:160]
