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
    ".": (2778, 17),
    "agents": (4514, 20),
    "algorithms": (2845, 33),
    "checkpoint": (687, 4),
    "config": (8341, 46),
    "data": (3779, 20),
    "diagnostics": (982, 6),
    "models": (4328, 18),
    "planning": (798, 5),
    "processes": (1490, 7),
    "rehearsal": (2197, 9),
    "report": (1566, 7),
    "rewards": (1683, 11),
    "run": (5108, 25),
    "serving": (3920, 17),
    "single_controller": (2104, 8),
    "trainer": (3204, 17),
    "workers": (18713, 98),
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
