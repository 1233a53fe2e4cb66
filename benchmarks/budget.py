"""How large each folder of ``hybridrl/`` may be: lines and files, its subfolders included.

They only fall: a change that exceeds one lowers another in the same commit, and says why; one that
makes a folder smaller lowers its figure, for which a test leaves ``SLACK`` lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.source_tree import Module

TOP = "."
SLACK = 40

BUDGETS: Mapping[str, tuple[int, int]] = {
    ".": (2479, 18),
    "agents": (3470, 20),
    "algorithms": (2818, 39),
    "checkpoint": (697, 5),
    "config": (8396, 61),
    "data": (3175, 24),
    "diagnostics": (1029, 6),
    "models": (3098, 20),
    "planning": (908, 10),
    "processes": (1389, 7),
    "rehearsal": (2164, 10),
    "report": (1636, 13),
    "rewards": (1743, 13),
    "run": (5037, 34),
    "serving": (4180, 19),
    "single_controller": (2400, 14),
    "trainer": (3202, 22),
    "workers": (19475, 116),
}
"""By folder; ``.`` has the files of the top level."""


def sizes_of(modules: Iterable[Module]) -> dict[str, tuple[int, int]]:
    """Return lines and files of each folder of the package."""
    num_lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    for module in modules:
        parts = module.path.parts
        inside = parts[parts.index("hybridrl") + 1 :]
        folder = inside[0] if len(inside) > 1 else TOP
        num_lines[folder] += module.num_lines
        num_files[folder] += 1
    return {folder: (num_lines[folder], num_files[folder]) for folder in sorted(num_lines)}
