from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    ExternalServersError,
    ServerDiedError,
)
from hybridrl.sampler import RequestParams
from hybridrl.serving import frozen
from hybridrl.serving.frozen import ApiKeys, ExternalModel
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, LaunchPlace, ServingSpec
from hybridrl.workers.rollout.sglang.elsewhere import (
    AttachedServer,
    differences,
    expect_policy_server,
    expect_server,
)
from hybridrl.workers.sharding.manager_client import Answer
from tests.config.values import config_of
from tests.serving.elsewhere import INFO, VOCAB_SIZE, ElsewhereServer, elsewhere, taking
from tests.serving.test_manager import with_tokenizer
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import rollout_config

KEY = "a-secret-of-the-servers"
MODULE = "hybridrl.workers.rollout.sglang.elsewhere"
POLICY = "serving.models.policy"
STOPPED = ["/abort_request", "/flush_cache", "/pause_generation", "/flush_cache"]
ATTACHED = ["/continue_generation", "/end_weight_update", *STOPPED]
PARAMS = RequestParams(max_new_tokens=3, temperature=1.0)
CONTEXTS = [torch.tensor([5, 6, token]) for token in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its weights, which the servers have."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    model = with_tokenizer(make_tiny_model(folder, vocab_size=VOCAB_SIZE))
    (model / "model.safetensors").unlink()
    return model


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_WAIT_S", 0.02)
    monkeypatch.setattr(f"{MODULE}._CALL_S", 1.0)
    monkeypatch.setattr(f"{MODULE}._APPEARS_S", 0.3)
    monkeypatch.setattr(f"{MODULE}._POLL_S", 0.02)


def judged_by(
    folder: Path, *urls: str, keys: str = "null", verified: str = "never"
) -> ExperimentConfig:
    return config_of(
        "serving.models={policy: {groups: {m: {num_devices: 1}}}, judge: "
        f"{{path: '{folder}', max_context_tokens: 30, urls: [{', '.join(urls)}], "
        f"key_variable: {keys}}}}}",
        *("serving.num_devices_per_node=1", "rollout.num_slots=2", "rollout.stage_timeout_s=2"),
        f"rollout.verify_weights={verified}",
        *("reward.function=judge", "reward.args={model: judge, template: '{response}'}"),
    )


@contextmanager
def started(
    folder: Path, *urls: str, key: str = "", verified: str = "never"
) -> Iterator[ExternalModel]:
    config = judged_by(folder, *urls, verified=verified)
    model = ExternalModel(config, "judge", keys=ApiKeys(by_model={"judge": key}))
    try:
        model.start()
        yield model
    finally:
        model.shutdown()


def refusal(opened: AbstractContextManager[object]) -> str:
    with pytest.raises(ExternalServersError) as refused, opened:
        pass
    return str(pickle.loads(pickle.dumps(refused.value)))


def spec_of(folder: Path, **changes: Any) -> ServingSpec:
    common: dict[str, Any] = {"engine": "sglang", "sleep": False, "stage_timeout_s": 5.0}
    return ServingSpec(
        model_folder=folder,
        rollout=replace(rollout_config(), **(common | changes)),
        lora=None,
        max_context_tokens=30,
        seed=0,
        device="cpu",
    )


def policy_at(url: str, *, key: str = "", weights: WeightRoute = "files") -> Elsewhere:
    return Elsewhere(url=url, key=key, section=POLICY, weights=weights)


@contextmanager
def attached(folder: Path, server: ElsewhereServer, **changes: Any) -> Iterator[AttachedServer]:
    given = policy_at(server.url, key=changes.pop("key", server.key))
    own = AttachedServer(spec_of(folder, **changes), given)
    try:
        yield own
    finally:
        own.end()


def last_tokens(answers: list[Answer]) -> list[object]:
    return [each if isinstance(each, str) else each.token_ids.tolist() for each in answers]


REPEATED = [[token] * 3 for token in range(12)]


# -- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"version": None}, "none of SGLang"),
        ({"version": "0.4.9"}, "SGLang 0.4.9 is too old"),
        (
            {"model_path": "/a/other", "served_model_name": "x"},
            "model_path='/a/other', must end with judge: set serving.models.judge.path",
        ),
        ({"model_type": "llama"}, "model_type='llama', must be qwen3"),
        ({"is_generation": False}, "is_generation=False, must be True"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16, must be float32: start it with --dtype float32"),
        ({"dtype": "auto"}, "dtype=auto, which is float16, must be float32"),
        ({"quantization": "fp8"}, "quantization='fp8', must be None"),
        ({"load_format": "dummy"}, "its weights are random"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode='decode', must be null"),
        (
            {"max_req_input_len": 29},
            "max_req_input_len=29 tokens, must be at least 30: start it with --context-length 38",
        ),
    ],
)
@pytest.mark.shows("4.23")
def test_a_difference_names_field_value_and_remedy(
    folder: Path, said: dict[str, object], line: str
) -> None:
    expected = expect_server(judged_by(folder, "http://h:1"), "judge")
    assert differences(expected, INFO, INFO) == []
    assert differences(expected, INFO, {"model_path": "/other/place/judge/"}) == []
    (found,) = differences(expected, INFO | said, {})
    assert line in found


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"model_type": "llama"}, "must be qwen3: start it with the model of model.path"),
        ({"dtype": "auto"}, "dtype=auto, must be float32: start it with --dtype float32"),
        ({"enable_lora": True}, "enable_lora=True, must be None or False: start it without"),
        (
            {"max_req_input_len": 29},
            "room for as many tokens, or lower data.max_prompt_tokens, or max_response_tokens of "
            "rollout or eval",
        ),
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"dp_size": 2}, "dp_size=2, must be 1 or None: start one server for each"),
        ({"pp_size": 2}, "or set serving.weights=files"),
    ],
)
@pytest.mark.shows("4.23")
def test_a_difference_of_a_policy_names_its_remedy_and_its_own_weights_do_not_matter(
    folder: Path, said: dict[str, object], line: str
) -> None:
    place = LaunchPlace(elsewhere=policy_at("", weights="broadcast"))
    spec = replace(spec_of(folder), place=place, returns_experts=True)
    expected = expect_policy_server(spec, POLICY)
    own = {"model_path": "/tmp/of/a/former/run", "load_format": "dummy"}
    fitting = INFO | own | {"enable_return_routed_experts": True, "dp_size": 1}
    assert differences(expected, fitting, fitting) == []
    (difference,) = differences(expected, fitting | said, said)
    assert line in difference


def test_weights_that_go_by_files_reach_a_server_of_several_ranks(folder: Path) -> None:
    by_files = expect_policy_server(spec_of(folder), POLICY)
    assert differences(by_files, INFO | {"dp_size": 2}, INFO | {"dp_size": 2}) == []


@pytest.mark.shows("4.23")
def test_a_server_that_differs_is_left_as_it_is(folder: Path) -> None:
    with taking(dtype="float16", quantization="awq") as server:
        lines = refusal(attached(folder, server)).splitlines()
        assert [line.partition(": ")[0] for line in lines] == [server.url] * 2
        assert server.controlled == []
    with taking() as server:
        server.vocab_size = 300
        text = refusal(attached(folder, server))
        assert f"vocab_size=300, must be {VOCAB_SIZE}: start it" in text
        server.vocab_size = VOCAB_SIZE
        server.spoils = {"meta_info": {}}
        assert "in another form than SGLang's (KeyError)" in refusal(attached(folder, server))
        assert not server.is_paused  # whoever asks it gets answers
    with elsewhere() as plain:  # it has none of the control routes
        assert "status 404" in refusal(attached(folder, plain))


@pytest.mark.shows("4.23")
def test_differences_of_all_servers_are_one_error(folder: Path) -> None:
    with (
        elsewhere() as fine,
        elsewhere(dtype="float16", quantization="awq", load_format="dummy") as other,
        elsewhere(key=KEY) as closed,
    ):
        closed.vocab_size = 300
        urls = (fine.url, other.url, closed.url)
        text = refusal(started(folder, *urls))
        lines = [line for line in text.splitlines() if "http" in line]
        assert "2 of 3 servers of serving.models.judge.urls cannot be used" in text
        assert [line.partition(": ")[0] for line in lines] == [other.url] * 3 + [closed.url]
        assert "set serving.models.judge.key_variable" in lines[3]
        (line,) = refusal(started(folder, closed.url, key=KEY)).splitlines()[1:]
        assert f"vocab_size=300, must be {VOCAB_SIZE}" in line


def test_a_server_without_log_probs_is_refused(folder: Path) -> None:
    with elsewhere() as server:
        server.spoils = {"output_ids": [1, 2]}
        text = refusal(started(folder, server.url))
    assert "it does not answer a request for a token with its log-prob: " in text
    assert "does not return what training needs" in text


@contextmanager
def talker(says: bytes | None) -> Iterator[str]:
    """A program that answers each connection with these bytes; None: it never says a word."""
    listening = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            kept.append(connection)
            if says is not None:
                connection.recv(1 << 16)
                connection.sendall(says)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        for connection in kept:
            connection.close()


def _http(text: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def test_a_server_that_gives_no_token_is_named_in_time(folder: Path) -> None:
    with elsewhere() as server:
        server.is_stuck = True
        text = refusal(started(folder, server.url))
    assert "it gave no token within rollout.stage_timeout_s=2 s" in text


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (None, "did not answer within 1 s"),
        (b"", "did not answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "did not answer in HTTP"),
        (_http(b"\xff\xfe\x80"), "did not answer in HTTP"),
        (_http(b"<html>It works!</html>"), "it is no SGLang"),
        (_http(b"[1]"), "it is no SGLang"),
        (_http(b'{"model": "vllm"}'), "none of SGLang"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 5\r\n\r\nnginx", "status 502: nginx"),
    ],
)
@pytest.mark.shows("4.23")
def test_another_program_on_the_port_is_named(
    folder: Path, says: bytes | None, reason: str
) -> None:
    with talker(says) as url:
        text = refusal(started(folder, url))
    assert f"{url}: " in text
    assert reason in text
    text = refusal(started(folder, url))  # nobody is there now
    assert text.count("serving.models.judge.urls") == 2


@pytest.mark.shows("4.24")
def test_weights_of_servers_are_compared_on_demand(folder: Path) -> None:
    with elsewhere() as one, elsewhere() as two, elsewhere() as other:
        with started(folder, one.url, two.url, verified="always"):
            pass
        other.sums = {"model.norm.weight": "1", "lm_head.weight": "3"}
        text = refusal(started(folder, one.url, two.url, other.url, verified="always"))
        (line,) = text.splitlines()[1:]
        assert line.startswith(f"{other.url}: 1 of its tensors are not those of {one.url}: ")
        assert "rank 0: lm_head.weight;" in line
        other.sums = None
        text = refusal(started(folder, one.url, other.url, verified="always"))
        assert f"{other.url}: it gives no checksums of its weights" in text
        assert "status 404" in text
        asked = len(one.asked)
        with started(folder, one.url, other.url, verified="first"):
            pass
        assert "/weights_checker" not in {path for path, _ in one.asked[asked:]}


# -- the key -------------------------------------------------------------------------------------


@pytest.mark.shows("4.23")
def test_a_key_reaches_its_servers_alone_and_no_text(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    texts = []
    with elsewhere(key=KEY) as server, elsewhere() as stranger:
        config = judged_by(folder, server.url, keys="JUDGE_KEY")
        keys = ApiKeys.read(config, own="a-key")
        texts += [repr(keys), repr(config), repr(vars(ExternalModel(config, "judge", keys=keys)))]
        with started(folder, server.url, key=keys.by_model["judge"]) as model:
            assert last_tokens(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == REPEATED
            server.repeats_headers = True
            texts += map(str, model.ask(CONTEXTS, PARAMS, timeout_s=20))
        assert "you sent Bearer (key)" in texts[-1]
        assert {sent for _, sent in server.asked} == {f"Bearer {KEY}"}
        server.repeats_headers = False
        texts.append(refusal(started(folder, server.url, key="wrong")))
        assert "it refuses the key (status 401)" in texts[-1]
        server.moves_to = stranger.url
        texts.append(refusal(started(folder, server.url, key=KEY)))
        assert "status 307" in texts[-1]
        assert stranger.asked == []
    assert not [text for text in [*texts, caplog.text] if KEY in text]


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.shows("4.23")
def test_only_these_routes_are_used_and_no_server_ends(folder: Path) -> None:
    with elsewhere() as one, elsewhere() as two:
        with started(folder, one.url, two.url) as model:
            for _ in range(2):
                assert last_tokens(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == REPEATED
            assert model.ask([], PARAMS, timeout_s=20) == []
        routes = {path for server in (one, two) for path, _ in server.asked}
        assert routes == {"/server_info", "/model_info", "/generate"}
        assert min(one.num_responses, two.num_responses) > 6
        with started(folder, one.url) as model:  # they serve others, too
            assert len(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == len(CONTEXTS)


def test_requests_of_a_lost_server_go_to_the_others(folder: Path) -> None:
    with elsewhere() as dying, elsewhere() as staying:
        dying.dies_after = 5  # of which 2 are its comparison
        with started(folder, dying.url, staying.url) as model:
            for _ in range(3):
                assert last_tokens(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == REPEATED
            assert dying.is_gone
            staying.stop()
            reasons = set(model.ask(CONTEXTS, PARAMS, timeout_s=20))
            assert all("judge: no rollout engine serves" in str(reason) for reason in reasons)
            assert all(server.url in str(reasons) for server in (dying, staying))


def test_a_server_that_comes_back_is_compared_and_asked(folder: Path) -> None:
    with elsewhere() as server, started(folder, server.url) as model:
        for _ in range(3):
            server.is_gone = True
            answers = model.ask(CONTEXTS, PARAMS, timeout_s=20)
            assert {type(each) for each in answers} == {str}
            server.is_gone = False
            before = len(server.asked)
            assert last_tokens(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == REPEATED
            assert server.asked[before][0] in ("/server_info", "/model_info")
        server.is_gone = True
        model.ask(CONTEXTS[:1], PARAMS, timeout_s=20)
        server.is_gone = False
        server.info |= {"weight_version": "7", "dtype": "float16"}
        (reason,) = model.ask(CONTEXTS[:1], PARAMS, timeout_s=20)
        assert "weight_version=7, was default" in str(reason)
        assert "dtype=float16, must be float32" in str(reason)


def test_a_server_that_is_back_within_a_call_answers(folder: Path) -> None:
    with elsewhere() as server, started(folder, server.url) as model:
        server.dies_after = server.num_responses + 4

        def come_back() -> None:
            while not server.is_gone:
                threading.Event().wait(0.01)
            server.dies_after = None
            server.is_gone = False

        thread = threading.Thread(target=come_back)
        thread.start()
        assert last_tokens(model.ask(CONTEXTS, PARAMS, timeout_s=20)) == REPEATED
        thread.join()


def test_other_weights_during_a_call_end_it(folder: Path) -> None:
    with elsewhere() as server, started(folder, server.url) as model:
        server.info["weight_version"] = "8"
        with pytest.raises(DriftError, match="version 8, and this run expects default"):
            model.ask(CONTEXTS, PARAMS, timeout_s=20)


# -- weights of the policy -----------------------------------------------------------------------


def test_nobody_at_the_url_is_named_in_bounded_time(folder: Path) -> None:
    with taking() as server:
        server.stop()
        text = refusal(attached(folder, server))
        assert f"{server.url}: " in text
        assert f"start it, or correct {POLICY}.urls" in text


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


@pytest.mark.shows("4.23")
def test_the_key_of_a_policy_is_in_no_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with taking(key=KEY) as server:
        texts = [refusal(attached(folder, server, key=key)) for key in ("", "wrong")]
        assert f"it requires a key: set {POLICY}.key_variable" in texts[0]
        assert "it refuses the key (status 401)" in texts[1]
        server.refuses_control = True
        texts.append(refusal(attached(folder, server, key=KEY)))
        assert "start it with --api-key alone" in texts[2]
        server.refuses_control = False
        with attached(folder, server) as own:
            where = policy_at(server.url, key=KEY)
            spec = replace(spec_of(folder), place=LaunchPlace(elsewhere=where))
            texts += [repr(vars(own)), repr(where), repr(spec)]
            server.repeats_headers = True
            with pytest.raises(EngineError) as refused:
                own.post("/flush_cache")
            texts.append(str(refused.value))
            assert "you sent Bearer (key)" in texts[-1]
    assert not [text for text in [*texts, caplog.text] if KEY in text]


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
                own.stamp(own.version_name(3))
                assert server.info["weight_version"] == own.version_name(3)
            own.end()
            assert server.controlled[len(ATTACHED) :] == [
                *("/update_weight_version", "/update_weight_version", "/continue_generation")
            ]
            assert not server.is_paused


@pytest.mark.shows("4.23")
def test_versions_of_two_runs_are_never_equal_and_another_update_is_noticed(folder: Path) -> None:
    with taking() as server, attached(folder, server) as one, attached(folder, server) as two:
        assert one.version_name(1) != two.version_name(1)
        one.begin_update()
        with pytest.raises(DriftError, match="a server takes the weights of one run") as drift:
            two.begin_update()  # while the other updates
        assert server.url in str(drift.value)
        one.stamp(one.version_name(1))
        with pytest.raises(DriftError, match=f"weight_version={one.version_name(1)}, must be"):
            two.begin_update()
    with taking() as server, attached(folder, server) as own:
        own.begin_update()
        own.begin_update()
        server.info["weight_version"] = "default"
        with pytest.raises(DriftError, match="weight_version=default, must be hybridrl-"):
            own.stamp(own.version_name(1))


def test_a_folder_of_weights_may_take_longer_than_a_stage_and_one_not_seen_is_named(
    folder: Path,
) -> None:
    short = {"stage_timeout_s": 0.5, "start_timeout_s": 1.5}
    with taking() as server, attached(folder, server, **short) as own:
        server.load_s = 1.0
        own.load_folder(folder, load_format="auto")
        server.load_s = 2.0
        with pytest.raises(DeadlineError, match=r"did not answer within 1\.5 s"):
            own.load_folder(folder, load_format="auto")
    with taking() as server, attached(folder, server) as own:
        server.sees_folder = False
        with pytest.raises(EngineError, match=r"the same folder \(/here\): point TMPDIR at"):
            own.load_folder(Path("/here"), load_format="auto")


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
