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
    ".": (2699, 17),
    "agents": (3949, 17),
    "algorithms": (2789, 32),
    "checkpoint": (699, 4),
    "config": (7557, 45),
    "data": (3766, 20),
    "diagnostics": (989, 6),
    "models": (4295, 18),
    "planning": (867, 6),
    "processes": (1323, 6),
    "rehearsal": (2126, 9),
    "report": (1574, 7),
    "rewards": (1673, 11),
    "run": (5143, 25),
    "serving": (3699, 16),
    "single_controller": (2103, 8),
    "trainer": (3047, 17),
    "workers": (18348, 97),
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
