"""Models, and the ranks of the layout that a test is run on."""

from __future__ import annotations

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
    """Of a layout with ``by_day="steps"``, leave the night all but these optimizer steps."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        layout = params.get("ranks")
        is_step = any(steps in item.name for steps in _STEPS_BY_DAY)
        if isinstance(layout, Layout) and layout.by_day == "steps" and not is_step:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="package")
def ranks(request: pytest.FixtureRequest) -> Iterator[RanksUnderTest]:
    """The ranks of ``request.param``, a layout."""
    ranks = RanksUnderTest(request.param)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(layout, tie=True, family=None)``: a folder, made once."""
    root = tmp_path_factory.mktemp("models")

    def make(layout: Layout, *, tie: bool = True, family: Family | None = None) -> Path:
        family = family or layout.family
        sizes: dict[str, Any] = dict(layout.sizes) if family == layout.family else {}
        if ENGINES[layout.engine].without_windows and family in WINDOWED:
            sizes["sliding_window"] = None
        of_sizes = "".join(f"-{size}" for size in sizes.values())
        tied = "tied" if tie else "untied"
        folder = root / f"{family}-{layout.num_layers}-{tied}{of_sizes}"
        if not folder.is_dir():
            make_tiny_model(
                folder,
                family,
                tie_embeddings=tie,
                num_layers=layout.num_layers,
                # An odd number of words, which ranks that share it must fill up.
                vocab_size=64 if tie else 67,
                **sizes,
            )
            save_tiny_tokenizer(folder)
        return folder

    return make


@pytest.fixture
def folder(ranks: RanksUnderTest, make_model: MakeModel) -> Path:
    """A model of the layout's family with tied embeddings."""
    return make_model(ranks.layout)
