from __future__ import annotations

import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybridrl.config.load import load_config
from hybridrl.errors import ExternalServersError
from hybridrl.main import compose
from hybridrl.run.launch import run
from hybridrl.sampler import RequestParams
from hybridrl.serving.frozen import ApiKeys, ExternalModel
from hybridrl.workers.rollout.sglang.arguments import build_arguments, environment
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.process import free_port
from hybridrl.workers.rollout.sglang.server import start_child
from tests.config.values import config_of
from tests.end_to_end.runs import make_untrained
from tests.end_to_end.small import SMALL, VARIED, read_metrics
from tests.end_to_end.test_judge import judged, require_judged
from tests.serving.elsewhere import files_with
from tests.serving.test_manager import with_tokenizer
from tests.sglang.engines import server_of, server_spec
from tests.sglang.test_run import run_command
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import greedy_of_hugging_face, make_prompts, stop

GREEDY = RequestParams(max_new_tokens=12, temperature=0.0)
PROMPTS = make_prompts([3, 9, 5, 2])
CONTEXTS = list(PROMPTS.token_ids_PL.unbind())


@pytest.fixture
def url(engine: SGLangEngine, served_model: Path) -> str:
    """A server whose weights are those of a folder, as of one that others started."""
    stop(engine)
    server_of(engine).require_success(
        "/update_weights_from_disk", model_path=str(served_model), load_format="auto"
    )
    engine.finish_update(version=0)
    engine.continue_generation()
    return server_of(engine).client.base_url


@pytest.fixture
def judge_folder(served_model: Path, tmp_path: Path) -> Path:
    """The model without its weights, as the run has it."""
    folder = with_tokenizer(tmp_path / served_model.name)
    (folder / "config.json").write_bytes((served_model / "config.json").read_bytes())
    return folder


@contextmanager
def judge_at(
    url: str, folder: Path, *overrides: str, key: str, max_context_tokens: int = 60
) -> Iterator[ExternalModel]:
    config = config_of(
        "serving.models={policy: {groups: {m: {num_devices: 1}}}, judge: {path: "
        f"'{folder}', max_context_tokens: {max_context_tokens}, urls: [{url}]}}}}",
        *("serving.num_devices_per_node=1", *overrides),
        *("reward.function=judge", "reward.args={model: judge, template: '{response}'}"),
    )
    model = ExternalModel(config, "judge", keys=ApiKeys(by_model={"judge": key}))
    try:
        model.start()
        yield model
    finally:
        model.shutdown()


@pytest.mark.shows("4.23")
def test_a_judge_elsewhere_answers_as_hugging_face(
    engine: SGLangEngine, url: str, judge_folder: Path, served_model: Path
) -> None:
    expected = greedy_of_hugging_face(served_model, PROMPTS, num_tokens=12)
    before = server_of(engine).process.pid
    for _ in range(2):
        with judge_at(url, judge_folder, key=server_of(engine).client.key) as judge:
            answers = judge.ask(CONTEXTS, GREEDY, timeout_s=60)
        for answer, sample in zip(answers, expected, strict=True):
            assert not isinstance(answer, str), answer
            assert answer.token_ids.tolist() == sample.token_ids.tolist()
            torch.testing.assert_close(answer.logprobs, sample.logprobs, atol=2e-5, rtol=0)
    assert server_of(engine).process.pid == before
    assert server_of(engine).info["status"] == "ready"


@pytest.mark.shows("4.23", "4.24")
def test_weights_of_real_servers_are_compared_and_one_that_differs_is_named(
    engine: SGLangEngine, url: str, judge_folder: Path
) -> None:
    urls = f"{url}, {url.replace('127.0.0.1', 'localhost')}"  # the same one twice
    key = server_of(engine).client.key
    with judge_at(urls, judge_folder, "rollout.verify_weights=always", key=key) as judge:
        sums = [each.checksums().result() for each in judge._handles.values()]
    assert sums[0] == sums[1]
    assert "rank 0: model.norm.weight" in sums[0]
    for changes, line in (
        ({"key": ""}, "it requires a key: set serving.models.judge.key_variable"),
        ({"key": "wrong"}, "it refuses the key (status 401)"),
        ({"key": key, "max_context_tokens": 99}, "max_req_input_len=98 tokens, must be at least"),
    ):
        with pytest.raises(ExternalServersError) as refused, judge_at(url, judge_folder, **changes):
            pass
        assert line in str(refused.value)
        assert key not in str(refused.value)


@contextmanager
def started_by_others(folder: Path, key: str) -> Iterator[str]:
    """A server with a tokenizer, as people start one, with a key."""
    spec = server_spec(folder)
    port = free_port()
    arguments = build_arguments(spec, name="judge", port=port, key=key)
    arguments |= {"load_format": "auto", "skip_tokenizer_init": False}
    process = start_child(arguments, variables=environment(spec))
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait_until_ready(lambda: answers(f"{url}/health"), timeout_s=150.0)
        yield url
        process.require_alive("whoever used it ended it")  # /health waits while a run pauses it
    finally:
        process.end()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).is_success
    except httpx.TransportError:
        return False


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.23")
def test_a_run_is_judged_by_a_server_with_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-secret-of-the-judge"
    monkeypatch.setenv("JUDGE_KEY", key)
    model = with_tokenizer(make_tiny_model(tmp_path / "judge", vocab_size=260))
    with started_by_others(model, key) as url:
        keys = f"urls: ['{url}'], key_variable: JUDGE_KEY"
        lines = judged(tmp_path, servers=(keys, "serving.num_devices_per_node=1"))
        require_judged(lines)
    assert files_with(key, tmp_path / "run") == []


KEY = "a-secret-of-the-engines"
NUM_STEPS = 30
TIMEOUT_S = 500


@pytest.fixture
def policy(served_model: Path) -> Path:
    """The model of the shared server, with a tokenizer of as many tokens: one a character."""
    characters = string.digits + string.ascii_letters
    known = {"<end>": 0, "<other>": 1} | {each: 2 + n for n, each in enumerate(characters)}
    tokens = Tokenizer(WordLevel(known, unk_token="<other>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")
    fast.save_pretrained(served_model)
    return served_model


def elsewhere(*urls: str) -> tuple[str, ...]:
    return (
        *("rollout=sglang", "serving.num_devices_per_node=0"),
        f"serving.models={{policy: {{urls: [{', '.join(urls)}], key_variable: ENGINE_KEY}}}}",
    )


def trained(folder: Path, policy: Path, url: str, *overrides: str) -> list[dict[str, float]]:
    small = [each for each in SMALL if not each.startswith("model.")]
    config = load_config(
        compose(
            [
                *(*small, f"trainer.run_dir={folder}", VARIED, "eval.every_num_steps=0"),
                *("model=hf_folder", f"model.path={policy}", *elsewhere(f"'{url}'"), *overrides),
            ]
        )
    )
    run(config, resolved_yaml=str(config))
    return read_metrics(folder)


def version_at(url: str, key: str) -> str:
    answer = httpx.post(
        f"{url}/generate",
        json={"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}},
        headers={"Authorization": f"Bearer {key}"},
        timeout=20.0,
    )
    return str(answer.json()["meta_info"]["weight_version"])


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.23")
def test_a_run_samples_with_a_server_of_others(
    engine: SGLangEngine, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(engine)
    url = server.client.base_url
    monkeypatch.setenv("ENGINE_KEY", server.client.key)
    before, names = server.process.pid, []
    ways = (("weights=files", 2), ("weights=broadcast", 1), ("weight_deltas=true", 2))
    for way, num_steps in ways:
        folder = tmp_path / way.partition("=")[2]
        lines = trained(folder, policy, url, f"serving.{way}", f"trainer.num_steps={num_steps}")
        steps = [line for line in lines if "loss/policy" in line]
        assert len(steps) == num_steps
        for step in steps:
            assert step["policy/sampler_mismatch_nats/max"] < 1e-3
            assert step["rollout/lost_engines"] == step["rollout/repeated_requests"] == 0
        assert len({step["reward/mean"] for step in steps} | {0.0}) > 1
        assert files_with(server.client.key, folder) == []
        names.append(version_at(url, server.client.key))  # it serves others
        assert names[-1].endswith(f"-{num_steps - 1}")
    assert len(set(names)) == len(ways)
    assert server.process.pid == before
    assert not server.has_died()


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.shows("4.23")
def test_a_run_goes_on_while_one_of_two_servers_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    model = make_untrained(tmp_path / "policy")
    with ExitStack() as opened, ExitStack() as killed, ThreadPoolExecutor(1) as thread:
        staying = opened.enter_context(started_by_others(model, KEY))
        going = killed.enter_context(started_by_others(model, KEY))
        training = thread.submit(
            run_command,
            tmp_path,
            *(*SMALL, VARIED, "checkpoint.every_num_steps=0", "eval.every_num_steps=0"),
            *elsewhere(f"'{staying}'", f"'{going}'"),
            num_steps=NUM_STEPS,
            timeout_s=TIMEOUT_S,
        )
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(
            lambda: (
                training.done() or (metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
            ),
            deadline_s=TIMEOUT_S,
        )
        killed.close()
        lines = training.result()
        assert version_at(staying, KEY).endswith(f"-{NUM_STEPS - 1}")
    steps = [line for line in lines if "loss/policy" in line]
    assert len(steps) == NUM_STEPS
    assert all(step["policy/sampler_mismatch_nats/max"] < 1e-3 for step in steps)
    assert [step["data/prompts"] for step in steps] == [4 * (n + 1) for n in range(NUM_STEPS)]
    assert sum(step["rollout/lost_engines"] for step in steps) == 1
