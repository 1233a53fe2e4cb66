"""What keeps the real server from starting is named, within the time that a start may take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hybridrl.errors import DeadlineError, EngineError, ModelError
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import server_spec

START_TIMEOUT_S = 150.0


def start(folder: Path, **keys: object) -> None:
    """Start a server that must not come up; one that does is ended before the test fails."""
    engine = SGLangEngine(
        server_spec(folder, **{"start_timeout_s": START_TIMEOUT_S, **keys}), variables={}
    )
    engine.shutdown()


@pytest.fixture
def folder(served_model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be spoilt."""
    return Path(shutil.copytree(served_model, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.timeout(200)
def test_unknown_arguments_are_all_named_with_what_is_meant(served_model: Path) -> None:
    with pytest.raises(EngineError) as raised:
        start(served_model, engine_args={"chunked_prefil_size": 512, "wrap_speed": 9})
    reason = "the installed SGLang has no such argument"
    text = str(raised.value)
    assert f"rollout.engine_args.chunked_prefil_size: {reason}; did you mean" in text
    assert "'chunked_prefill_size'" in text
    assert f"rollout.engine_args.wrap_speed: {reason}" in text


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_model_that_sglang_does_not_know_shows_its_log(folder: Path) -> None:
    change_config(folder, model_type="nobody", architectures=["NobodyForCausalLM"])
    with pytest.raises(EngineError, match=r"did not start: SGLang .*(was killed|ended)") as raised:
        start(folder)
    assert "nobody" in str(raised.value)
    assert "last lines of its log" in str(raised.value)


@pytest.mark.timeout(200)
def test_an_engine_that_dies_at_its_start_shows_why(served_model: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start: SGLang .*(was killed|ended)") as raised:
        start(served_model, engine_args={"attention_backend": "warp"})
    assert "warp" in str(raised.value)


def test_a_server_that_is_not_up_in_time_is_named_with_the_key(served_model: Path) -> None:
    with pytest.raises(DeadlineError, match=r"rollout\.start_timeout_s=1 s; raise it"):
        start(served_model, start_timeout_s=1.0)


def test_another_vocabulary_is_refused_before_a_start(folder: Path) -> None:
    change_config(folder, vocab_size=70)
    with pytest.raises(ModelError, match=r"has 64 rows, and config\.json says vocab_size=70"):
        start(folder)


def test_a_broken_file_of_weights_is_refused_before_a_start(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="safetensors"):
        start(folder)
