"""Models, and the ranks of the layout that a test is run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.layouts import Layout
from tests.contract.ranks_under_test import RanksUnderTest
from tests.tiny_models import Family, make_tiny_model

MakeModel = Callable[..., Path]


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
        folder = root / f"{family}-{layout.num_layers}-{'tied' if tie else 'untied'}"
        if not folder.is_dir():
            make_tiny_model(
                folder,
                family,
                tie_embeddings=tie,
                num_layers=layout.num_layers,
                # An odd number of words, which ranks that share it must fill up.
                vocab_size=64 if tie else 67,
            )
            (folder / "tokenizer.json").write_text("{}")
        return folder

    return make


@pytest.fixture
def folder(ranks: RanksUnderTest, make_model: MakeModel) -> Path:
    """A model of the layout's family with tied embeddings."""
    return make_model(ranks.layout)
