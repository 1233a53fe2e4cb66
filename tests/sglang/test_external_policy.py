"""Real servers of SGLang that others run, as engines of the policy: they get its weights."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.run.launch import run
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.end_to_end.small import SMALL, VARIED, read_metrics
from tests.serving.elsewhere import files_with
from tests.serving.test_frozen import with_tokenizer
from tests.sglang.strangers import server_of
from tests.sglang.test_external import started_by_others
from tests.sglang.test_run import run_command
from tests.tiny_models import make_tiny_model

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
    """The name of the weights with which a server answers now."""
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
    for way, num_steps in (("files", 3), ("broadcast", 1)):
        folder = tmp_path / way
        lines = trained(
            folder, policy, url, f"serving.weights={way}", f"trainer.num_steps={num_steps}"
        )
        steps = [line for line in lines if "loss/policy" in line]
        assert len(steps) == num_steps
        for step in steps:
            assert step["policy/sampler_mismatch_nats/max"] < 1e-3
            assert step["rollout/lost_engines"] == step["rollout/repeated_requests"] == 0
        assert len({step["reward/mean"] for step in steps} | {0.0}) > 1
        assert files_with(server.client.key, folder) == []
        names.append(version_at(url, server.client.key))  # it serves others
        assert names[-1].endswith(f"-{num_steps - 1}")
    assert len(set(names)) == 2
    assert server.process.pid == before
    assert not server.has_died()


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.shows("4.23")
def test_a_run_goes_on_while_one_of_two_servers_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    model = with_tokenizer(make_tiny_model(tmp_path / "policy", vocab_size=512, num_layers=1))
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
        wait_for_lines(metrics, 3, training.done)
        killed.close()
        lines = training.result()
        assert version_at(staying, KEY).endswith(f"-{NUM_STEPS - 1}")
    steps = [line for line in lines if "loss/policy" in line]
    assert len(steps) == NUM_STEPS
    assert all(step["policy/sampler_mismatch_nats/max"] < 1e-3 for step in steps)
    assert [step["data/prompts"] for step in steps] == [4 * (n + 1) for n in range(NUM_STEPS)]
    assert sum(step["rollout/lost_engines"] for step in steps) == 1


def wait_for_lines(file: Path, count: int, has_ended: Callable[[], bool]) -> None:
    """Return when a run has written so many lines of metrics, or has ended."""
    while not (file.exists() and len(file.read_text().splitlines()) >= count):
        if has_ended():
            return
        threading.Event().wait(0.1)
