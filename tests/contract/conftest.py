"""Models, and the ranks of the layout that a test is run on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.layouts import ENGINES, Layout
from tests.contract.ranks_under_test import RanksUnderTest
from tests.tiny_models import WINDOWED, Family, make_tiny_model, save_tiny_tokenizer

MakeModel = Callable[..., Path]


_STEPS_BY_DAY = ("many micro-batches", "a rank without rows")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the night all that a layout's ``by_day`` does not name."""
    num_tests: Counter[tuple[Path, str]] = Counter()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        layout = params.get("ranks")
        if not isinstance(layout, Layout) or item.get_closest_marker("nightly"):
            continue
        steps_by_day = _STEPS_BY_DAY[: layout.dp_size]  # no rank is without rows where all share
        if any(steps in item.name for steps in steps_by_day):
            continue
        is_by_day = layout.by_day == "all"
        if layout.by_day == "turns":
            place = num_tests[item.path, layout.name]
            num_tests[item.path, layout.name] += 1
            others = [o.name for o in ENGINES[layout.engine].layouts if o.by_day == "turns"]
            is_by_day = place % 2 == others.index(layout.name)
        if not is_by_day:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="package")
def ranks(request: pytest.FixtureRequest) -> Iterator[RanksUnderTest]:
    ranks = RanksUnderTest(request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(layout, tie=True, family=None, seed=0)``: a folder, made once."""
    root = tmp_path_factory.mktemp("models")

    def make(
        layout: Layout, *, tie: bool = True, family: Family | None = None, seed: int = 0
    ) -> Path:
        family = family or layout.family
        sizes: dict[str, Any] = dict(layout.sizes) if family == layout.family else {}
        if ENGINES[layout.engine].without_windows and family in WINDOWED:
            sizes["sliding_window"] = None
        of_sizes = "".join(f"-{size}" for size in sizes.values())
        tied = "tied" if tie else "untied"
        folder = root / f"{family}-{layout.num_layers}-{tied}{of_sizes}-{seed}"
        if not folder.is_dir():
            make_tiny_model(
                folder,
                family,
                tie_embeddings=tie,
                num_layers=layout.num_layers,
                # An odd number of words, which ranks that share it must fill up.
                vocab_size=64 if tie else 67,
                seed=seed,
                **sizes,
            )
            save_tiny_tokenizer(folder)
        return folder

    return make


@pytest.fixture
def folder(ranks: RanksUnderTest, make_model: MakeModel) -> Path:
    return make_model(ranks.layout)
