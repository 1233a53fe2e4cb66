from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def starter_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Made models are kept for the session, and not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
