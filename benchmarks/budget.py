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
    ".": (2663, 17),
    "agents": (4391, 20),
    "algorithms": (2769, 27),
    "checkpoint": (656, 4),
    "config": (8264, 46),
    "data": (3654, 19),
    "diagnostics": (950, 6),
    "models": (4153, 18),
    "planning": (687, 5),
    "processes": (1482, 7),
    "rehearsal": (2152, 9),
    "report": (1512, 7),
    "rewards": (1650, 11),
    "run": (4881, 24),
    "serving": (3882, 17),
    "single_controller": (2065, 8),
    "trainer": (3067, 17),
    "workers": (18211, 96),
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
