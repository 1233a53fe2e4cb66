from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def starter_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Made models are kept for the session, of all its workers, and not in the user's cache."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDRL_CACHE", str(folder / "cache"))
        yield
