"""What an SGLang server can do is read from its own answers.

The answers under ``sglang_answers`` were recorded from running servers of the three releases.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang import capabilities as server_capabilities
from hybridrl.workers.rollout.sglang.capabilities import (
    TESTED_VERSIONS,
    Capability,
    ServerCapabilities,
    read_capabilities,
)

ANSWERS = Path(__file__).parent / "sglang_answers"
SINCE_0_5_21 = (
    Capability.UPDATE_SESSION,
    Capability.READY_ROUTE,
    Capability.IDLE_WHILE_RETRACTED,
    Capability.VERSION_PER_TOKEN,
    Capability.KEEP_CUDA_GRAPHS,
)
SINCE_0_5_23 = (Capability.REFUSE_FLUSH_ALIVE, Capability.NAME_BAD_SAMPLING_KEY)


def recorded(version: str, /, **server_info: object) -> ServerCapabilities:
    """Read one release's answers, with some fields of server_info as given."""
    answers = json.loads((ANSWERS / f"{version}.json").read_text())
    return read_capabilities(answers["server_info"] | server_info, answers["openapi"])


@pytest.fixture(autouse=True)
def _warnings_start_anew() -> Iterator[None]:
    server_capabilities._warn_untested.cache_clear()
    yield
    server_capabilities._warn_untested.cache_clear()


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_each_release_has_what_its_sources_have(version: str) -> None:
    server = recorded(version)

    newer_than_17, newest = version != "0.5.17", version == "0.5.23"
    assert [server.can(one) for one in SINCE_0_5_21] == [newer_than_17] * len(SINCE_0_5_21)
    assert [server.can(one) for one in SINCE_0_5_23] == [newest] * len(SINCE_0_5_23)
    assert server.draft_field == ("selector" if newer_than_17 else "disable_draft_model")
    assert server.version == version
    assert server.is_tested


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_what_all_three_releases_share(version: str) -> None:
    server = recorded(version)

    for capability in (
        Capability.UPDATE_FROM_TENSOR,
        Capability.UPDATE_FROM_DISTRIBUTED,
        Capability.UPDATE_FROM_DISK,
        Capability.PAUSE,
        Capability.RELEASE_MEMORY,
        Capability.CHECK_WEIGHTS,
        Capability.LOADS,
    ):
        server.require(capability)
    assert server.pause_modes == ("abort", "retract", "in_place")
    assert server.default_pause_mode == "abort"
    assert server.flush_waits


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_a_server_that_hides_its_routes_is_taken_by_its_version(version: str) -> None:
    answers = json.loads((ANSWERS / f"{version}.json").read_text())

    hidden = read_capabilities(answers["server_info"], None)

    shown = recorded(version)
    assert hidden.available == shown.available
    assert hidden.pause_modes == shown.pause_modes
    assert hidden.default_pause_mode == shown.default_pause_mode
    assert hidden.flush_waits == shown.flush_waits
    assert hidden.draft_field == shown.draft_field


def test_a_missing_capability_names_it_the_version_and_the_one_that_has_it() -> None:
    with pytest.raises(EngineError) as caught:
        recorded("0.5.17").require(Capability.VERSION_PER_TOKEN)

    assert str(caught.value) == (
        "SGLang 0.5.17 cannot tell the weight version of each token (meta_info.weight_versions); "
        "SGLang 0.5.21 and newer can: pip install 'sglang>=0.5.21'"
    )


@pytest.mark.parametrize(
    ("capability", "switch"),
    [
        (Capability.ADAPTER_FROM_TENSORS, "enable_lora"),
        (Capability.ROUTED_EXPERTS, "enable_return_routed_experts"),
        (Capability.SEEDS, "enable_deterministic_inference"),
        (Capability.FREE_MEMORY, "enable_memory_saver"),
        (Capability.BACK_UP_WEIGHTS, "enable_weights_cpu_backup"),
    ],
)
@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_what_was_not_switched_on_names_its_argument(
    capability: Capability, switch: str, version: str
) -> None:
    with pytest.raises(EngineError, match=f"set rollout.engine_args.{switch}=true"):
        recorded(version).require(capability)

    recorded(version, **{switch: True}).require(capability)


def test_a_build_without_a_route_of_its_version_is_told_apart() -> None:
    answers = json.loads((ANSWERS / "0.5.23.json").read_text())
    del answers["openapi"]["paths"]["/weights_checker"]
    server = read_capabilities(answers["server_info"], answers["openapi"])

    with pytest.raises(
        EngineError, match=r"this build .* does not serve /weights_checker.*0\.5\.23"
    ):
        server.require(Capability.CHECK_WEIGHTS)


def test_a_pause_mode_that_is_not_there_is_refused_with_those_that_are() -> None:
    server = recorded("0.5.21")

    server.require_pause_mode("retract")
    with pytest.raises(EngineError, match="no pause mode 'nap'; it has abort, retract, in_place"):
        server.require_pause_mode("nap")


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
def test_an_untested_version_is_warned_of_once_and_taken_for_the_one_before(
    version: str, like: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = recorded(like, version=version)
        second = recorded(like, version=version)

    assert first == second
    assert not first.is_tested
    assert first.available == recorded(like).available
    (warning,) = caplog.messages
    assert f"SGLang {version} is not tested" in warning
    assert "tested are 0.5.17, 0.5.21, 0.5.23" in warning
    assert f"that of {like}." in warning


def test_a_post_release_of_a_tested_version_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    assert recorded("0.5.21", version="0.5.21.post1").is_tested
    assert not caplog.messages


@pytest.mark.parametrize("answer", [{}, {"version": None}, {"version": "vLLM"}])
def test_what_is_no_sglang_is_refused(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="is another program on its port"):
        read_capabilities(answer, None)


def test_a_server_of_another_version_than_was_read_is_refused() -> None:
    server = recorded("0.5.21")

    server.require_same_version({"version": "0.5.21"})
    with pytest.raises(EngineError, match=r"now is SGLang 0\.5\.23, but .* from SGLang 0\.5\.21"):
        server.require_same_version({"version": "0.5.23"})
