"""Mixtures of experts, and ranks of their layouts, which stay for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.layouts import Layout
from tests.contract.ranks_under_test import RanksUnderTest
from tests.workers.train.megatron.expert_layouts import BY_DAY, MODELS, make_expert_model, running


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("folder") in list(MODELS):  # others have parameters of this name, too
            layout = params["saved_by"] if "saved_by" in params else params["ranks"][0]
            if (params["folder"], layout) not in BY_DAY:
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_expert_model(tmp_path_factory.mktemp("model"), **MODELS[request.param])


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RanksUnderTest]:
    """The ranks of a layout, or of one that has a name, see ``cut_as``."""
    if isinstance(request.param, Layout):
        ranks = RanksUnderTest(request.param)
        yield ranks
        ranks.close()
    else:
        name, megatron = request.param
        with running(name, **megatron) as ranks:
            yield ranks
