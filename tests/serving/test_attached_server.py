"""A server of others that takes the policy's weights: compared, marked, and left to them."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.serving import WeightRoute
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    ExternalServersError,
    ServerDiedError,
)
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, LaunchPlace, ServingSpec
from hybridrl.workers.rollout.sglang.elsewhere import (
    AttachedServer,
    differences,
    expect_policy_server,
)
from tests.serving.elsewhere import INFO, VOCAB_SIZE, TakingServer, elsewhere, taking
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import rollout_config

KEY = "a-secret-of-the-servers"
MODULE = "hybridrl.workers.rollout.sglang.elsewhere"
SECTION = "serving.models.policy"
STOPPED = ["/abort_request", "/flush_cache", "/pause_generation", "/flush_cache"]
ATTACHED = ["/continue_generation", "/end_weight_update", *STOPPED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy"), vocab_size=VOCAB_SIZE)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._APPEARS_S", 0.3)
    monkeypatch.setattr(f"{MODULE}._POLL_S", 0.02)


def spec_of(folder: Path, **changes: Any) -> ServingSpec:
    common: dict[str, Any] = {
        "engine": "sglang",
        "sleep": False,
        "stage_timeout_s": 5.0,
    }
    return ServingSpec(
        model_folder=folder,
        rollout=replace(rollout_config(), **(common | changes)),
        lora=None,
        max_context_tokens=30,
        seed=0,
        device="cpu",
    )


def _elsewhere(url: str, *, key: str = "", weights: WeightRoute = "files") -> Elsewhere:
    return Elsewhere(url=url, key=key, section=SECTION, weights=weights)


def attach(folder: Path, url: str, *, key: str = "", **changes: Any) -> AttachedServer:
    return AttachedServer(spec_of(folder, **changes), _elsewhere(url, key=key))


@contextmanager
def attached(folder: Path, server: TakingServer, **changes: Any) -> Iterator[AttachedServer]:
    own = attach(folder, server.url, key=server.key, **changes)
    try:
        yield own
    finally:
        own.end()


def refusal(folder: Path, url: str, *, key: str = "", **changes: Any) -> str:
    with pytest.raises(ExternalServersError) as refused:
        attach(folder, url, key=key, **changes)
    return str(pickle.loads(pickle.dumps(refused.value)))


# -- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"model_type": "llama"}, "must be qwen3: start it with the model of model.path"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16, must be float32: start it with --dtype float32"),
        ({"dtype": "auto"}, "dtype=auto, must be float32: start it with --dtype float32"),
        ({"enable_lora": True}, "enable_lora=True, must be None or False: start it without"),
        (
            {"max_req_input_len": 29},
            "must be at least 30: start it with --context-length 38 and room for as many tokens, "
            "or lower data.max_prompt_tokens or rollout.max_response_tokens",
        ),
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"dp_size": 2}, "dp_size=2, must be 1 or None: start one server for each"),
        ({"pp_size": 2}, "or set serving.weights=files"),
    ],
)
@pytest.mark.shows("4.23")
def test_a_difference_names_its_remedy(folder: Path, said: dict[str, object], line: str) -> None:
    place = LaunchPlace(elsewhere=_elsewhere("", weights="broadcast"))
    spec = replace(spec_of(folder, routed_experts=True), place=place)
    expected = expect_policy_server(spec, SECTION)
    fitting = INFO | {"enable_return_routed_experts": True, "dp_size": 1}
    assert differences(expected, fitting, INFO) == []
    (difference,) = differences(expected, fitting | said, said)
    assert line in difference


@pytest.mark.shows("4.23")
def test_its_own_weights_and_their_name_do_not_matter(folder: Path) -> None:
    expected = expect_policy_server(spec_of(folder), SECTION)
    other = {"model_path": "/tmp/of/a/former/run", "load_format": "dummy", "dp_size": 2}
    assert differences(expected, INFO | other, INFO | other) == []


@pytest.mark.shows("4.23")
def test_a_server_that_differs_is_left_as_it_is(folder: Path) -> None:
    with taking(dtype="float16", quantization="awq") as server:
        lines = refusal(folder, server.url).splitlines()
        assert [line.partition(": ")[0] for line in lines] == [server.url] * 2
        assert server.controlled == []
    with elsewhere() as server:  # it has none of the control routes
        assert "status 404" in refusal(folder, server.url)


def test_another_vocabulary_or_answer_is_named(folder: Path) -> None:
    with taking() as server:
        server.vocab_size = 300
        assert f"vocab_size=300, must be {VOCAB_SIZE}: start it with" in refusal(folder, server.url)
        server.vocab_size = VOCAB_SIZE
        server.spoils = {"output_ids": [1, 2]}
        assert "a request for a token with its log-prob" in refusal(folder, server.url)
        server.spoils = {"meta_info": {}}
        assert "in another form than SGLang's (KeyError)" in refusal(folder, server.url)
        assert not server.is_paused  # whoever asks it gets answers


def test_nobody_at_the_url_is_named_in_bounded_time(folder: Path) -> None:
    with taking() as server:
        server.stop()
        text = refusal(folder, server.url)
        assert f"{server.url}: " in text
        assert f"start it, or correct {SECTION}.urls" in text
        with taking(port=server.port) as later, attached(folder, later):
            pass


def test_a_server_that_starts_late_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}._APPEARS_S", 30.0)
    with taking() as server:
        server.is_gone = True

        def come() -> None:
            wait_until(lambda: len(server.asked) > 5)
            server.is_gone = False

        thread = threading.Thread(target=come)
        thread.start()
        with attached(folder, server):
            thread.join()


# -- the key -------------------------------------------------------------------------------------


@pytest.mark.shows("4.23")
def test_the_key_is_in_no_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with taking(key=KEY) as server:
        texts = [refusal(folder, server.url), refusal(folder, server.url, key="wrong")]
        assert f"it requires a key: set {SECTION}.key_variable" in texts[0]
        assert "it refuses the key (status 401)" in texts[1]
        server.refuses_control = True
        texts.append(refusal(folder, server.url, key=KEY))
        assert "start it with --api-key alone" in texts[2]
        server.refuses_control = False
        with attached(folder, server) as own:
            where = _elsewhere(server.url, key=KEY)
            spec = replace(spec_of(folder), place=LaunchPlace(elsewhere=where))
            texts += [repr(vars(own)), repr(where), repr(spec)]
            server.repeats_headers = True
            with pytest.raises(EngineError) as refused:
                own.post("/flush_cache")
            texts.append(str(refused.value))
            assert "you sent Bearer (key)" in texts[-1]
    assert not [text for text in [*texts, caplog.text] if KEY in text]


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.shows("4.23")
def test_it_stops_when_attached_and_serves_when_left(folder: Path) -> None:
    with taking() as server:
        for _ in range(2):  # the second run comes to the same server
            server.asked.clear()
            server.is_paused = server.has_update = True  # a run was killed in its update
            with attached(folder, server) as own:
                assert server.controlled == ATTACHED
                assert server.is_paused
                assert not server.has_update
                own.begin_update()
                own.finish_update(3)
                assert server.info["weight_version"] == own.version_name(3)
            own.end()
            assert server.controlled[len(ATTACHED) :] == [
                *("/update_weight_version", "/update_weight_version", "/continue_generation"),
            ]
            assert not server.is_paused


@pytest.mark.shows("4.23")
def test_versions_of_two_runs_are_never_equal(folder: Path) -> None:
    with taking() as server, attached(folder, server) as one, attached(folder, server) as two:
        assert one.version_name(1) != two.version_name(1)
        one.begin_update()
        with pytest.raises(DriftError, match="a server takes the weights of one run") as drift:
            two.begin_update()  # while the other updates
        assert server.url in str(drift.value)
        one.finish_update(1)
        with pytest.raises(DriftError, match=f"weight_version={one.version_name(1)}, must be"):
            two.begin_update()


def test_a_server_updated_or_started_again_meanwhile_is_noticed(folder: Path) -> None:
    with taking() as server, attached(folder, server) as own:
        own.begin_update()
        own.begin_update()
        server.info["weight_version"] = "default"
        with pytest.raises(DriftError, match="weight_version=default, must be hybridrl-"):
            own.finish_update(1)


def test_a_folder_that_it_does_not_see_is_named(folder: Path) -> None:
    with taking() as server, attached(folder, server) as own:
        own.load_folder(Path("/here"), load_format="auto")
        server.sees_folder = False
        with pytest.raises(EngineError, match=r"the same folder \(/here\): point TMPDIR at"):
            own.load_folder(Path("/here"), load_format="auto")


def test_a_folder_of_weights_may_take_longer_than_a_stage(folder: Path) -> None:
    short = {"stage_timeout_s": 0.5, "start_timeout_s": 1.5}
    with taking() as server, attached(folder, server, **short) as own:
        server.load_s = 1.0
        own.load_folder(folder, load_format="auto")
        server.load_s = 2.0
        with pytest.raises(DeadlineError, match=r"did not answer within 1\.5 s"):
            own.load_folder(folder, load_format="auto")


# -- its end -------------------------------------------------------------------------------------


@pytest.mark.shows("4.14")
def test_only_lost_connections_in_a_row_mean_death(folder: Path) -> None:
    with taking() as server, attached(folder, server) as own:
        for _ in range(3):
            for is_gone in (True, True, False):
                server.is_gone = is_gone
                if is_gone:
                    with pytest.raises(EngineError):
                        own.progress()
                else:
                    own.progress()
        assert not own.has_died()
        for _ in range(2):
            for is_gone in (True, True, False):
                server.is_gone = is_gone
                server.repeats_headers = not is_gone  # it answers, if only with an error
                with pytest.raises(EngineError):
                    own.progress()
        assert not own.has_died()
        own.require_alive("drain")
        server.is_gone = True
        for _ in range(3):
            with pytest.raises(EngineError):
                own.progress()
        assert own.has_died()
        with pytest.raises(ServerDiedError, match=f"drain: {server.url}, which others run"):
            own.require_alive("drain")
