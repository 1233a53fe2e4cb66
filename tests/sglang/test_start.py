from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor

from hybridrl import env
from hybridrl.config.model import LoraConfig
from hybridrl.errors import DeadlineError, EngineError, ModelError
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.workers.rollout.protocol import MemoryTag, stage_time
from hybridrl.workers.rollout.sglang import server
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.memory import base_shapes
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port
from tests.sglang.engines import (
    kill_server,
    recorded_engine,
    server_of,
    server_spec,
    sync,
    weights_of,
)
from tests.sglang.recorded_server import calls_in
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import stop
from tests.workers.train.lora_engines import LORA

START_TIMEOUT_S = 150.0


def fail_to_start(folder: Path, **keys: object) -> None:
    """Start a server that must not come up; one that does is ended before the test fails."""
    engine = SGLangEngine(
        server_spec(folder, **{"start_timeout_s": START_TIMEOUT_S, **keys}), variables={}
    )
    engine.shutdown()


@pytest.fixture
def folder(served_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(served_model, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_unknown_arguments_are_all_named_with_what_is_meant(by_itself: Sequence[str]) -> None:
    one, other = (line for line in by_itself if "rollout.engine_args" in line)
    reason = "the installed SGLang has no such argument"
    assert f"rollout.engine_args.chunked_prefil_size: {reason}; did you mean" in one
    assert "'chunked_prefill_size'" in one
    assert f"rollout.engine_args.wrap_speed: {reason}" in other


def test_megatron_core_cannot_change_the_memory_saver_of_a_server(by_itself: Sequence[str]) -> None:
    """On a GPU such a server died while it captured its graphs, wherever both were installed."""
    assert "hook_mode: preload" in by_itself


@pytest.mark.timeout(200)
def test_an_engine_that_dies_at_its_start_shows_why(served_model: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start: SGLang .*(was killed|ended)") as raised:
        fail_to_start(served_model, engine_args={"attention_backend": "warp"})
    assert "warp" in str(raised.value)


def test_a_server_that_is_not_up_in_time_is_named_with_the_key(served_model: Path) -> None:
    with pytest.raises(DeadlineError, match=r"rollout\.start_timeout_s=1 s; raise it"):
        fail_to_start(served_model, start_timeout_s=1.0)


def test_another_vocabulary_or_a_broken_file_of_weights_is_refused_before_a_start(
    folder: Path,
) -> None:
    change_config(folder, vocab_size=70)
    with pytest.raises(ModelError, match=r"has 64 rows, and config\.json says vocab_size=70"):
        fail_to_start(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="safetensors"):
        fail_to_start(folder)


Start = Callable[..., AbstractContextManager[SGLangEngine]]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


@pytest.fixture
def start(served_model: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def started(
        changes: dict[str, object] | None = None,
        *,
        folder: Path = served_model,
        lora: LoraConfig | None = None,
        **keys: object,
    ) -> AbstractContextManager[SGLangEngine]:
        spec = replace(server_spec(folder, **keys), lora=lora)
        return recorded_engine(spec, calls, monkeypatch, changes)

    return started


@pytest.mark.shows("2.1", "2.11", "5.6")
def test_a_cycle_asks_what_the_release_wants_in_its_order(
    start: Start, served_model: Path, calls: Path
) -> None:
    stopped = ["/abort_request", "/flush_cache?timeout=1.00", "/pause_generation", "/flush_cache"]
    with start() as engine:
        stop(engine)
        assert [path for path, _ in calls_in(calls)] == stopped  # a flush behind a closed door
        for _ in range(2):
            for part in MemoryTag:
                engine.release(part)
            for part in MemoryTag:
                engine.resume(part)
        for number in range(2):
            sync(engine, weights_of(served_model), version=number)
    tags = [body["tags"][0] for path, body in calls_in(calls) if path.startswith("/release_")]
    assert tags == ["weights", "kv_cache", "cuda_graph"] * 2
    paths = [path for path, _ in calls_in(calls)]
    assert paths.count("/update_weights_from_tensor") == 4
    assert paths.count("/begin_weight_update") == paths.count("/end_weight_update") == 2


class _OnDevice(Tensor):
    """A tensor of a GPU as far as a sender meets it: only a copy of it may leave the process."""

    def cpu(self, *_: object, **__: object) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise AssertionError("a handle of device memory was made")


def test_an_adapter_is_handed_over_from_the_host(
    start: Start, served_model: Path, calls: Path
) -> None:
    shapes = adapter_shapes(base_shapes(served_model), LORA)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    with start(lora=LORA) as engine:
        engine.pause()
        adapter = {name: each.as_subclass(_OnDevice) for name, each in values.items()}
        engine.load_adapter(adapter, version=0)
        ((path, body),) = calls_in(calls)
        arrived = MultiprocessingSerializer.deserialize(body["serialized_named_tensors"][0])
    assert path == "/load_lora_adapter_from_tensors"
    assert arrived.keys() == values.keys()
    assert all(torch.equal(arrived[name], values[name]) for name in values)


def test_a_server_that_was_replaced_or_died_within_the_step_is_not_asked_for_a_profile(
    start: Start, calls: Path, tmp_path: Path
) -> None:
    with start() as engine:
        engine.profile(tmp_path / "step-1.engine-0")
        engine.restart()
        engine.profile(None)
        engine.profile(tmp_path / "step-1.engine-0")
        kill_server(engine)
        wait_until(engine.has_died)
        engine.profile(None)
    assert [path for path, _ in calls_in(calls) if "profile" in path] == ["/start_profile"] * 2


def test_all_answers_of_a_stage_together_get_its_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = {"/resume_memory_occupation": 1.2, "/continue_generation": 0.0}
    monkeypatch.setenv("RECORDED_DELAYS", json.dumps(delays))
    with start() as engine:
        stop(engine)
        for part in MemoryTag:
            engine.release(part)
        with stage_time(2.0):
            engine.resume(MemoryTag.WEIGHTS)
            with pytest.raises(DeadlineError, match="/resume_memory_occupation: SGLang did not "):
                engine.resume(MemoryTag.KV_CACHE)
        engine.resume(MemoryTag.KV_CACHE)


@pytest.mark.shows("4.7")
def test_two_servers_that_draw_the_same_port_end_on_two(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = free_port()
    ports = iter([drawn, drawn, free_port()])
    monkeypatch.setattr(server, "free_port", lambda: next(ports))
    with start() as first, start() as second:
        assert next(ports, None) is None
        assert server_of(first).client.key != server_of(second).client.key
        infos = [engine._server.info for engine in (first, second)]
        assert infos[0]["port"] == drawn != infos[1]["port"]
        assert [info["served_model_name"] for info in infos] == [
            server_of(engine).name for engine in (first, second)
        ]


def test_a_server_that_changed_its_arguments_is_refused(start: Start) -> None:
    names = ("dtype", "context_length", "tp_size")
    with pytest.raises(EngineError) as raised, start(dict.fromkeys(names, "other")):
        raise AssertionError("it may not start")
    assert all(f"{name}='other' instead of" in str(raised.value) for name in names)


def test_a_server_that_returns_no_routed_experts_is_refused(start: Start, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "moe", "qwen3_moe", tie_embeddings=False)
    changes = {"enable_return_routed_experts": True}
    with start(changes, folder=folder, returns_experts=True):
        pass
    expected = "enable_return_routed_experts=False instead of True"
    with (
        pytest.raises(EngineError, match=expected),
        start({"enable_return_routed_experts": False}, folder=folder, returns_experts=True),
    ):
        raise AssertionError("it may not start")
    with pytest.raises(ModelError, match="has no experts"), start(returns_experts=True):
        raise AssertionError("it may not start")


@pytest.mark.shows("4.7")
def test_a_port_that_another_process_took_is_left_to_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = iter([taken, taken, free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        monkeypatch.setattr(server, "PROBE_TIMEOUT_S", 0.3)
        with start() as engine:
            assert engine._server.info["port"] != taken
        assert next(ports, None) is None


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (("model.embed_token.weight", torch.zeros(64, 32)), "did you mean 'model.embed_tokens"),
        (("model.norm.weight", torch.zeros(7)), r"of shape \[7\] was to be sent, .* have \[32\]"),
    ],
)
def test_a_tensor_that_the_server_would_drop_in_silence_is_refused(
    start: Start, calls: Path, tensor: tuple[str, torch.Tensor], word: str
) -> None:
    with start() as engine, pytest.raises(EngineError, match=word):
        engine.stage([tensor])
    assert calls_in(calls) == []


def test_processes_are_named_whatever_stands_first_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setattr(env, "everything", lambda: first | dict(os.environ))
    line = tmp_path / "command_line"
    program = f"""
import os, pathlib, setproctitle
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # as SGLang does
setproctitle.setproctitle("sglang::scheduler")
pathlib.Path({str(line)!r}).write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
"""
    child = ChildProcess([sys.executable, "-c", program], name="scheduler")
    try:
        wait_until(lambda: child.exit_status() is not None)
    finally:
        child.end()
    assert line.read_bytes().startswith(b"sglang::scheduler\0")
