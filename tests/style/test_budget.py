"""No folder of the package grows: benchmarks/budget.py says how large each may be."""

from __future__ import annotations

from collections import Counter

from benchmarks import source_tree as tree
from benchmarks.budget import BUDGETS, SLACK, sizes_of
from hybridrl.env import ROOT

MOST_FILES = 20
"""Of one folder, ``__init__.py`` among them."""


def test_no_folder_is_larger_than_its_budget_and_what_it_lost_is_not_given_back() -> None:
    sizes = sizes_of(tree.read_modules(ROOT / "hybridrl", root=ROOT))
    assert sizes.keys() == BUDGETS.keys()
    too_large = {
        folder: f"{sizes[folder]} lines and files, of {budget} in benchmarks/budget.py"
        for folder, budget in BUDGETS.items()
        if sizes[folder][0] > budget[0] or sizes[folder][1] > budget[1]
    }
    assert too_large == {}
    to_lower = {
        folder: f"write {sizes[folder]} in benchmarks/budget.py"
        for folder, (num_lines, num_files) in BUDGETS.items()
        if sizes[folder][0] < num_lines - SLACK or sizes[folder][1] < num_files
    }
    assert to_lower == {}


def test_no_folder_has_more_files_than_a_reader_can_overlook() -> None:
    num_files = Counter(path.parent for path in (ROOT / "hybridrl").rglob("*.py"))
    assert [str(folder) for folder, count in num_files.items() if count > MOST_FILES] == []
