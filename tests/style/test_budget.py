"""No folder of the package grows: benchmarks/budget.py says how large each may be."""

from __future__ import annotations

from benchmarks import source_tree as tree
from benchmarks.budget import BUDGETS, SLACK, sizes_of
from hybridrl.env import ROOT


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
