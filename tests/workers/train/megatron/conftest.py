"""Ranks of mixture-of-experts layouts, which stay for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.ranks_under_test import RanksUnderTest
from tests.workers.train.megatron.expert_layouts import running


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RanksUnderTest]:
    """The ranks of a layout, see ``cut_as``."""
    name, megatron = request.param
    with running(name, **megatron) as it:
        yield it
