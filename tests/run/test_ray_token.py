from __future__ import annotations

import logging
import secrets
from pathlib import Path

import pytest

from hybridrl.run.cluster import keep_token_private


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


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
