from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(autouse=True)
def _folders_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")
