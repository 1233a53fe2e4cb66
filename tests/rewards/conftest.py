from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybridrl.rewards.scorer import RewardScorer
from tests.rewards.rows import scorer_of, write_function


@pytest.fixture
def open_scorer(tmp_path: Path) -> Iterator[Callable[..., RewardScorer]]:
    """Write a reward function, its head and its body, to a file, and load it."""
    with ExitStack() as opened:

        def open_one(head: str, body: str, **others: object) -> RewardScorer:
            return opened.enter_context(scorer_of(write_function(tmp_path, head, body), **others))

        yield open_one
