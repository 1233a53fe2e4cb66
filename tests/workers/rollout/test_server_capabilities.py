"""What an SGLang server can do is read from its own answers.

The answers under ``sglang_answers`` were recorded from running servers of the three releases.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang import capabilities
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, ServerSpec
from hybridrl.workers.rollout.sglang.capabilities import (
    TESTED_VERSIONS,
    Capability,
    ServerCapabilities,
    read_capabilities,
)
from tests.workers.rollout.engines import rollout_config

ANSWERS = Path(__file__).parent / "sglang_answers"
SWITCHES = {
    Capability.ADAPTER_FROM_TENSORS: "enable_lora",
    Capability.ROUTED_EXPERTS: "enable_return_routed_experts",
    Capability.FREE_MEMORY: "enable_memory_saver",
    Capability.BACK_UP_WEIGHTS: "enable_weights_cpu_backup",
}
SINCE_0_5_21 = {Capability.UPDATE_SESSION, Capability.KEEP_CUDA_GRAPHS}


def recorded(version: str, /, *, lacks: str = "", **server_info: object) -> ServerCapabilities:
    """Read one release's answers, without a route and with some fields of server_info as given."""
    answers = json.loads((ANSWERS / f"{version}.json").read_text())
    answers["openapi"]["paths"].pop(lacks, None)
    return read_capabilities(answers["server_info"] | server_info, answers["openapi"])


@pytest.fixture(autouse=True)
def _warnings_start_anew() -> Iterator[None]:
    capabilities._warn_if_untested.cache_clear()
    yield
    capabilities._warn_if_untested.cache_clear()


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_each_release_has_what_its_sources_have(version: str) -> None:
    server = recorded(version)
    newer = SINCE_0_5_21 if version == "0.5.17" else set()
    assert server.available == set(Capability) - SWITCHES.keys() - newer
    assert server.pause_modes == ("abort", "retract", "in_place")
    assert server.version == version


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_a_server_that_hides_its_routes_is_taken_by_its_version(version: str) -> None:
    answers = json.loads((ANSWERS / f"{version}.json").read_text())
    hidden, shown = read_capabilities(answers["server_info"], None), recorded(version)
    assert replace(hidden, routes=shown.routes) == shown


def test_a_missing_capability_names_the_version_that_has_it() -> None:
    with pytest.raises(EngineError) as raised:
        recorded("0.5.17").require(Capability.KEEP_CUDA_GRAPHS)
    assert str(raised.value) == (
        "SGLang 0.5.17 cannot keep captured CUDA graphs intact while their memory is released; "
        "SGLang 0.5.21 and newer can: pip install 'sglang>=0.5.21'"
    )


@pytest.mark.parametrize("capability", SWITCHES)
@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_what_was_not_switched_on_names_its_argument(capability: Capability, version: str) -> None:
    switch = SWITCHES[capability]
    with pytest.raises(EngineError, match=f"set rollout.engine_args.{switch}=true"):
        recorded(version).require(capability)
    switched_on: dict[str, Any] = {switch: True}
    recorded(version, **switched_on).require(capability)


@pytest.mark.parametrize(
    ("keys", "route"),
    [
        ({"transport": "auto"}, "/update_weights_from_tensor"),
        ({"transport": "disk"}, "/update_weights_from_disk"),
        ({"verify_weights": "first"}, "/update_weights_from_disk"),
        ({"verify_weights": "first"}, "/weights_checker"),
        ({}, "/pause_generation"),
        ({"sleep": True}, "/release_memory_occupation"),
    ],
)
def test_a_server_without_a_route_that_the_run_needs_is_refused(
    keys: dict[str, object], route: str
) -> None:
    rollout = replace(rollout_config(), sleep=False)
    plain = ServerSpec(
        model_folder=ANSWERS,
        rollout=replace(rollout, transport="shared"),
        lora=None,
        max_context_tokens=32,
        seed=0,
        device="cpu",
    )
    server = recorded("0.5.23", lacks=route)
    needs_it = replace(plain, rollout=replace(rollout, **keys))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=rf"this build .* does not serve {route}.*0\.5\.23"):
        server.require_for(needs_it)
    recorded("0.5.23").require_for(needs_it)
    if keys and keys != {"transport": "auto"}:
        server.require_for(plain)


def test_a_server_of_others_needs_the_route_of_serving_weights() -> None:
    spec = ServerSpec(
        model_folder=ANSWERS,
        rollout=replace(rollout_config(), sleep=False),
        lora=None,
        max_context_tokens=32,
        seed=0,
        device="cpu",
        elsewhere=Elsewhere(url="", key="", section="", weights="broadcast"),
    )
    route = "/update_weights_from_distributed"
    with pytest.raises(EngineError, match=route):
        recorded("0.5.23", lacks=route).require_for(spec)
    recorded("0.5.23", lacks="/update_weights_from_tensor").require_for(spec)


@pytest.mark.parametrize("version", ["0.5.16", "0.4.99", "0.5.9.post2"])
def test_a_version_older_than_the_oldest_tested_is_refused(version: str) -> None:
    with pytest.raises(EngineError, match=f"SGLang {version} is too old; 0.5.17 is the oldest"):
        recorded("0.5.17", version=version)


@pytest.mark.parametrize(
    ("version", "like"),
    [
        ("0.5.18", "0.5.17"),
        ("0.5.22.dev7+g1a2b3c", "0.5.21"),
        ("0.5.23rc1", "0.5.23"),
        ("0.6.0", "0.5.23"),
    ],
)
def test_an_untested_version_is_warned_of_once(
    version: str, like: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = recorded(like, version=version), recorded(like, version=version)
    assert first == second
    assert first.available == recorded(like).available
    (warning,) = caplog.messages
    assert f"SGLang {version} is not tested" in warning
    assert "tested are 0.5.17, 0.5.21, 0.5.23" in warning
    assert f"that of {like}." in warning


def test_a_post_release_of_a_tested_version_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    recorded("0.5.21", version="0.5.21.post1")
    assert not caplog.messages


@pytest.mark.parametrize("answer", [{}, {"version": None}, {"version": "vLLM"}])
def test_what_is_no_sglang_is_refused(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="is another program on its port"):
        read_capabilities(answer, None)
