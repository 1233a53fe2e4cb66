"""Print the figures of this code beside their targets: ``make figures`` writes docs/figures.md.

They are alarms, not goals. Only import rules and import cycles fail a test (tests/style).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks import source_tree as tree
from benchmarks.budget import BUDGETS, sizes_of
from benchmarks.source_tree import Module
from hybridrl import errors
from hybridrl.config.load import known_keys

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "benchmarks" / "durations.json"
HEAVY = ("sglang", "megatron", "hydra", "peft")
# Roughly: an imperative that tells what to type or do.
_REMEDY = re.compile(
    r"fix=|remedies=|\b(set|use|raise|lower|make|call|install|pass|give|give it|correct|mend|"
    r"remove|add|write|start|wait|choose|reshape|must|did you mean|nearest)\b"
)
Row = tuple[str, str, str]


def main() -> None:
    sys.stdout.write(page())


def page() -> str:
    """Measure, and return docs/figures.md."""
    lines = [
        "# Figures of this code",
        "",
        "Made by `make figures`; a test compares them. Targets are alarms, not goals: splitting a",
        "clear 45-line function in two unclear ones is worse.",
        "",
        "| figure | measured | target |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in measure()),
        *budget(),
        *durations(),
    ]
    return "\n".join(lines) + "\n"


def budget() -> Iterator[str]:
    yield from ("", "## Lines and files by folder", "")
    yield "A test holds them: a folder grows only if `benchmarks/budget.py` says so."
    yield from ("", "| folder of `hybridrl/` | lines | at most | files |", "|---|---|---|---|")
    for folder, sizes in sizes_of(tree.read_modules(ROOT / "hybridrl", root=ROOT)).items():
        yield f"| `{folder}` | {sizes[0]} | {BUDGETS[folder][0]} | {sizes[1]} |"


def durations() -> Iterator[str]:
    """Yield the table of seconds by folder of the tests' last recorded run, if there is one."""
    if not DURATIONS.is_file():
        return
    folders = json.loads(DURATIONS.read_text(encoding="utf-8"))
    yield from ("", "## Seconds of tests by folder", "")
    yield "Of all workers of `RECORD_DURATIONS=benchmarks/durations.json make test`."
    yield from ("", "| folder | tests | seconds |", "|---|---|---|")
    for folder, (num_tests, seconds) in sorted(folders.items(), key=lambda item: -item[1][1]):
        yield f"| `{folder}` | {num_tests} | {seconds:.0f} |"
    totals = [sum(column) for column in zip(*folders.values(), strict=True)]
    yield f"| in all | {totals[0]} | {totals[1]:.0f} |"


def measure() -> list[Row]:
    source = tree.read_modules(ROOT / "hybridrl", root=ROOT)
    tests = tree.read_modules(ROOT / "tests", root=ROOT)
    areas: list[Callable[[list[Module]], Iterator[Row]]] = [sizes, words, structure, habits, raises]
    rows = [*chain.from_iterable(area(source) for area in areas), *of_tests(source, tests)]
    return [*rows, step_figure(source)]


def sizes(modules: list[Module]) -> Iterator[Row]:
    functions = [function for module in modules for function in module.functions]
    classes = [cls for module in modules for cls in module.classes]
    yield "files, lines", f"{len(modules)}, {sum(m.num_lines for m in modules)}", ""
    yield (
        "file lines p50 / p90 / max",
        spread([m.num_lines for m in modules if m.num_lines]),
        "120 / 300 / 340",
    )
    yield (
        "function lines p50 / p90 / max",
        spread([tree.num_lines(f) for f in functions]),
        "8 / 30 / 60",
    )
    methods = [sum(isinstance(n, tree.Function) for n in cls.body) for cls in classes]
    longest = max(tree.num_lines(cls) for cls in classes)
    yield "class lines max, methods max", f"{longest}, {max(methods)}", "250, 12"
    counts = [tree.parameters(function) for function in functions]
    most = f"{percentile([n for n, _ in counts], 90)} (max positional {max(n for _, n in counts)})"
    yield "parameters p90", most, "4 (max positional 3)"
    depths = [tree.nesting(function) for function in functions]
    yield "nesting p90 / max", f"{percentile(depths, 90)} / {max(depths)}", "2 / 3"


def words(modules: list[Module]) -> Iterator[Row]:
    """Yield documentation: docstrings, comments, shapes."""
    public = [
        node
        for module in modules
        for node in (*module.functions, *module.classes)
        if not node.name.startswith("_")
    ]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    yield "public names with a docstring", share(documented, len(public)), "90%"
    functions = [node for node in public if isinstance(node, tree.Function)]
    tensors = [function for function in functions if takes_tensor(function)]
    yield (
        "of public functions with a Tensor, share that state a shape",
        share(sum(states_shape(function) for function in tensors), len(tensors)),
        "100%",
    )
    total = sum(module.num_lines for module in modules)
    docs = sum(module.num_docstring_lines for module in modules)
    comments = sum(module.num_comment_lines for module in modules)
    yield (
        "docstring / comment share of lines",
        f"{share(docs, total)} / {share(comments, total)}",
        "10-16% / 3-6%",
    )


def takes_tensor(function: tree.Function) -> bool:
    """Say whether ``Tensor`` stands in the signature, batches and containers not counted."""
    annotations = [arg.annotation for arg in (*function.args.args, *function.args.kwonlyargs)]
    parts = [function.returns, *annotations]
    return any(part is not None and "Tensor" in ast.unparse(part).split("[") for part in parts)


def states_shape(function: tree.Function) -> bool:
    """Say whether the docstring holds a shape like ``[P, G]``, or a name ends in its letters."""
    named = ast.unparse(function.args) + (ast.get_docstring(function) or "")
    return re.search(r"\[[A-Z]\w*(, *\w+)*\]|_[A-Z]{1,4}\b|scalar", named) is not None


def structure(modules: list[Module]) -> Iterator[Row]:
    cycles = tree.import_cycles(modules)
    inner = sum(
        name.startswith("hybridrl")
        for module in modules
        for function in module.functions
        for name in tree.imported_names(function)
    )
    yield ("import cycles; first-party imports in functions", f"{len(cycles)}; {inner}", "0; 0")
    files = [
        sum(any(name.split(".")[0] == heavy for name in module.imports) for module in modules)
        for heavy in HEAVY
    ]
    yield f"files that import {' / '.join(HEAVY)}", " / ".join(map(str, files)), "at most 1 each"
    pairs = tree.duplicates(modules, min_lines=8)
    yield "duplicate function pairs of 8 or more lines", str(len(pairs)), "0"
    yield "config keys", str(len(list(known_keys()))), "at most 160"


def habits(modules: list[Module]) -> Iterator[Row]:
    prints = sum(len(module.calls_of("print")) for module in modules)
    handlers = [
        node for module in modules for node in module.nodes if isinstance(node, ast.ExceptHandler)
    ]
    swallowed = sum(tree.swallows(handler) for handler in handlers)
    yield "`print`, swallowed `except Exception`", f"{prints}, {swallowed}", "0, 0"
    total = sum(module.num_lines for module in modules)
    clever = sum(len(module.calls_of("getattr", "hasattr")) for module in modules)
    yield "getattr/hasattr per 1000 lines", f"{1000 * clever / total:.2f}", "0.5"
    environ = sum("os.environ" in m.text for m in modules if m.name != "hybridrl.env")
    yield "files with `os.environ` outside env.py", str(environ), "0"
    asserts = sum(isinstance(node, ast.Assert) for module in modules for node in module.nodes)
    yield "`assert`", str(asserts), "0"
    yield "TODO", str(sum(module.text.count("TODO") for module in modules)), "0"


def raises(modules: list[Module]) -> Iterator[Row]:
    own = {name for name, value in vars(errors).items() if isinstance(value, type)}
    calls = [
        node.exc
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    ours = sum(tree.called(call) in own for call in calls)
    valued = sum(any(isinstance(node, ast.FormattedValue) for node in ast.walk(c)) for c in calls)
    chained = [
        node.cause is not None
        for module in modules
        for handler in module.nodes
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    remedied = sum(bool(_REMEDY.search(ast.unparse(call))) for call in calls)
    shares = [ours, valued, remedied]
    yield (
        "raises: own class / shows the value / remedy / `from` in except",
        f"{' / '.join(share(n, len(calls)) for n in shares)} / {share(sum(chained), len(chained))}",
        "95 / 85 / 70 / 100%",
    )


def of_tests(source: list[Module], tests: list[Module]) -> Iterator[Row]:
    lines = [sum(module.num_lines for module in modules) for modules in (tests, source)]
    yield "test lines per line of source", f"{lines[0] / max(1, lines[1]):.2f}", "0.8-1.0"
    functions = [f for m in tests for f in m.functions if f.name.startswith("test_")]
    long = percentile([tree.num_lines(function) for function in functions], 90)
    marks = (map(ast.dump, function.decorator_list) for function in functions)
    parametrized = sum("parametrize" in "".join(of_one) for of_one in marks)
    yield (
        "tests; lines p90; parametrized",
        f"{len(functions)}; {long}; {share(parametrized, len(functions))}",
        "p90 25; 20%",
    )
    mocks = sum(any("mock" in name for name in module.imports) for module in tests)
    yield "test files that use a mock", share(mocks, len(tests)), "2%"


def step_figure(modules: list[Module]) -> Row:
    """Measure the training step: the function ``step`` of trainer/step.py."""
    steps = [
        function
        for module in modules
        if module.name == "hybridrl.trainer.step"
        for function in module.functions
        if function.name in ("step", "__call__")
    ]
    branches = [sum(isinstance(n, ast.If | ast.IfExp) for n in ast.walk(f)) for f in steps]
    measured = [f"{tree.num_lines(f)} / {count}" for f, count in zip(steps, branches, strict=True)]
    return "training step: lines / branches", ", ".join(measured) or "-", "30 / 0"


def spread(values: Sequence[int]) -> str:
    return f"{percentile(values, 50)} / {percentile(values, 90)} / {max(values)}"


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)] if ranked else 0


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


if __name__ == "__main__":
    main()
