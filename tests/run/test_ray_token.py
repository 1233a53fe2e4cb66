from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.run.ray_token import keep_token_private


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


_START = """
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.run.cluster import ray_cluster
import ray
with ray_cluster(load_config(compose([])).cluster):
    assert ray.get(ray.remote(lambda: 7).remote(), timeout=60) == 7
"""


@pytest.mark.shows("R8.2")
def test_a_ray_started_here_has_a_token_that_nobody_else_can_read(home: Path) -> None:
    # A process of its own: Ray keeps what it read. No worker imports what ranks need.
    environment = os.environ | {"HOME": str(home), "RAY_preload_python_modules": "json"}
    subprocess.run([sys.executable, "-c", _START], env=environment, timeout=120, check=True)
    token = home / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.shows("R8.2")
def test_a_token_that_is_there_is_kept_and_its_readers_are_told(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("mine")
    with caplog.at_level(logging.WARNING, logger="hybridrl"):
        token.chmod(0o644)
        keep_token_private()
        token.chmod(0o600)
        keep_token_private()
    assert token.read_text() == "mine"
    [message] = caplog.messages
    assert f"chmod 600 {token}" in message


def test_a_token_appears_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / ".ray" / "auth_token"
    is_there_before = []

    def draw(num_bytes: int) -> str:
        is_there_before.append(token.exists())
        return "7" * 2 * num_bytes

    monkeypatch.setattr(secrets, "token_hex", draw)
    keep_token_private()
    assert is_there_before == [False]
    assert token.read_text() == "7" * 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "0" * 64)]
)
def test_where_the_user_chose_another_way_no_token_is_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert not (home / ".ray").exists()
