"""Which releases of SGLang are driven; their answers were recorded from running servers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrl.env import ROOT
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang import server
from hybridrl.workers.rollout.sglang.server import TESTED_VERSIONS, require_known_version

SOURCES = ROOT / "hybridrl" / "workers" / "rollout" / "sglang"


def recorded(version: str) -> dict[str, Any]:
    """The answers of a release."""
    file = Path(__file__).parent / "sglang_answers" / f"{version}.json"
    answers: dict[str, Any] = json.loads(file.read_text())
    return answers


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about versions; asyncio may speak of other tests meanwhile."""
    return [each.getMessage() for each in caplog.records if each.name == server.__name__]


@pytest.fixture(autouse=True)
def _warnings_start_anew() -> Iterator[None]:
    server._warn_if_untested.cache_clear()
    yield
    server._warn_if_untested.cache_clear()


@pytest.mark.shows("5.5")
@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_each_tested_release_has_every_route_that_is_asked(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = "".join(path.read_text() for path in SOURCES.glob("*.py"))
    asked = set(re.findall(r'"(/[a-z_]+(?:/[a-z_]+)?)["?]', text))
    answers = recorded(version)
    assert len(asked) > 20
    assert asked <= answers["openapi"]["paths"].keys()
    pause = answers["openapi"]["components"]["schemas"]["PauseGenerationReqInput"]
    assert "abort" in pause["properties"]["mode"]["enum"]
    assert require_known_version(answers["server_info"]) == version
    assert warnings_in(caplog) == []


@pytest.mark.shows("5.5")
@pytest.mark.parametrize("version", ["0.5.20", "0.4.99", "0.5.9.post2"])
def test_a_version_older_than_the_oldest_tested_is_refused(version: str) -> None:
    with pytest.raises(EngineError, match=f"SGLang {version} is too old; 0.5.21 is the oldest"):
        require_known_version({"version": version})


@pytest.mark.parametrize("version", ["0.5.22.dev7+g1a2b3c", "0.5.23rc1", "0.6.0"])
def test_an_untested_version_is_warned_of_once(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        require_known_version({"version": version})
        require_known_version({"version": version})
    (warning,) = warnings_in(caplog)
    assert f"SGLang {version} is not tested" in warning
    assert "tested are 0.5.21, 0.5.23" in warning


def test_a_post_release_of_a_tested_version_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    require_known_version({"version": "0.5.21.post1"})
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("answer", [{}, {"version": None}, {"version": "vLLM"}])
def test_what_is_no_sglang_is_refused(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="is another program on its port"):
        require_known_version(answer)
