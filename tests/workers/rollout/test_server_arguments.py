from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config.model import LoraConfig
from hybridrl.env import ROOT
from hybridrl.errors import EngineError
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang import server
from hybridrl.workers.rollout.sglang.arguments import (
    ServingSpec,
    build_arguments,
    device_name,
    environment,
    show_devices,
)
from hybridrl.workers.rollout.sglang.memory import base_shapes, held_bytes
from hybridrl.workers.rollout.sglang.rehearsal import violation_of
from hybridrl.workers.rollout.sglang.server import TESTED_VERSIONS, require_known_version
from tests.config.values import config_of
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import rollout_config


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')


def spec_of(*, lora: LoraConfig | None = None, device: str = "cuda", **changes: Any) -> ServingSpec:
    return ServingSpec(
        model_folder=Path("model"),
        rollout=replace(rollout_config(), engine="sglang", **changes),
        lora=lora,
        max_context_tokens=100,
        seed=2**31 + 5,
        device=device,
    )


def arguments_of(spec: ServingSpec) -> dict[str, object]:
    return build_arguments(spec, name="me", port=20_000, key="secret")


def test_the_typed_keys_become_the_names_that_sglang_knows() -> None:
    spec = spec_of(
        num_slots=7,
        memory_fraction=0.6,
        tensor_parallel_size=2,
        engine_args={"cuda_graph_bs": (1, 2), "schedule_policy": "lpm", "x": None},
        lora=config_of("lora=default").lora,
    )
    found = arguments_of(replace(spec, num_adapters=3))
    expected = {
        **{"model_path": "model", "served_model_name": "me", "load_format": "dummy"},
        **{"host": "127.0.0.1", "port": 20_000, "random_seed": 5, "tp_size": 2},
        **{"max_running_requests": 7, "mem_fraction_static": 0.6},
        **{"disable_cuda_graph": False, "enable_memory_saver": True},
        **{"enable_lora": True, "max_lora_rank": 16},
        **{"max_loras_per_batch": 3, "max_loaded_loras": 3},
        **{"cuda_graph_bs": [1, 2], "schedule_policy": "lpm", "x": None},  # as JSON has it
    }
    assert {name: found[name] for name in expected} == expected
    assert "q_proj" in str(found["lora_target_modules"])


def test_a_cpu_gets_no_memory_saver_and_no_graphs() -> None:
    found = arguments_of(spec_of(device="cpu"))
    assert (found["device"], found["enable_memory_saver"]) == ("cpu", False)
    assert found["disable_cuda_graph"] is True
    assert environment(spec_of(device="cpu"))["OMP_NUM_THREADS"] == "1"
    for device in ("cpu", "cuda"):  # else log-probs would be those at temperature 1
        assert environment(spec_of(device=device))["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


@pytest.mark.parametrize(
    ("base", "backup_weights", "sleep", "keeps"),
    [
        ("backup", "ledger", True, True),
        ("resident", "ledger", True, False),
        ("resend", "ledger", True, False),
        ("resident", "always", True, True),
        ("backup", "always", False, False),
        (None, "ledger", True, False),
    ],
)
def test_a_host_copy_is_kept_only_where_the_ledger_needs_one(
    base: Any, backup_weights: str, sleep: bool, keeps: bool
) -> None:
    lora = None if base is None else replace(config_of("lora=default").lora, base=base)
    spec = spec_of(lora=lora, backup_weights=backup_weights, sleep=sleep)
    assert arguments_of(spec)["enable_weights_cpu_backup"] is keeps


@pytest.mark.parametrize(
    ("device", "sleep", "graphs_in_pieces"),
    [("cuda", True, False), ("cuda", False, True), ("cpu", True, True)],
)
def test_prefill_graphs_are_off_where_graph_memory_is_released(
    device: str, sleep: bool, graphs_in_pieces: bool
) -> None:
    sent = arguments_of(spec_of(device=device, sleep=sleep))
    assert sent.get("cuda_graph_backend_prefill", "breakable") == (
        "breakable" if graphs_in_pieces else "disabled"
    )


@pytest.mark.shows("5.7")
def test_expandable_segments_never_reach_a_server_on_a_gpu() -> None:
    variables = environment(spec_of())
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == variables["PYTORCH_ALLOC_CONF"] == ""
    assert variables["NCCL_GRAPH_REGISTER"] == "0"


@pytest.mark.parametrize(
    ("listed", "index", "expected"), [("", 2, "2"), ("4,5,6,7", 3, "7"), ("GPU-b", 0, "GPU-b")]
)
def test_a_gpu_is_named_as_other_processes_of_the_node_know_it(
    monkeypatch: pytest.MonkeyPatch, listed: str, index: int, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert device_name(torch.device("cuda", index)) == expected
    assert device_name(torch.device("cpu")) == ""


def test_a_server_sees_the_gpus_of_all_its_ranks_in_their_order() -> None:
    assert show_devices(["GPU-b", "GPU-a"]) == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    assert show_devices(["", ""]) == {}


@pytest.mark.parametrize("is_tied", [True, False])
def test_shapes_are_those_of_the_model_and_of_an_adapters_file(
    tmp_path: Path, is_tied: bool
) -> None:
    folder = make_tiny_model(tmp_path, tie_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert base_shapes(folder) == shapes  # tied ones once
    overrides = ("lora=default", "lora.rank=2", "lora.target_modules=[q_proj]")
    adapter = adapter_shapes(base_shapes(folder), config_of(*overrides).lora)
    assert len(adapter) == 2 * model.config.num_hidden_layers
    outputs, inputs = shapes["model.layers.0.self_attn.q_proj.weight"]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert adapter[f"{layer}.lora_A.weight"] == (2, inputs)
    assert adapter[f"{layer}.lora_B.weight"] == (outputs, 2)


def test_a_server_is_never_believed_to_hold_more_than_it_says() -> None:
    usage = {"weight": 10.0, "kvcache": 0.0005, "graph": {"decode": 0.2, "prefill": 0.3}}
    info = {"internal_states": [{"memory_usage": usage}]}
    assert 9 * 2**30 < held_bytes(info, MemoryTag.WEIGHTS) < 10 * 2**30
    assert held_bytes(info, MemoryTag.KV_CACHE) == 0
    assert 0.4 * 2**30 < held_bytes(info, MemoryTag.CUDA_GRAPH) < 0.5 * 2**30


@pytest.mark.parametrize(
    ("names", "key", "remedies"),
    [
        (["mem_fraction_static"], "rollout.memory_fraction", ()),
        (["context_length"], "data.max_prompt_tokens", ()),
        (["enable_weights_cpu_backup"], "rollout.backup_weights", ()),
        (["page_size"], "rollout.engine_args.page_size", (("~rollout.engine_args.page_size",),)),
        (
            ["page_size", "chunked_prefill_size"],
            "rollout.engine_args.page_size",
            (("~rollout.engine_args.page_size", "~rollout.engine_args.chunked_prefill_size"),),
        ),
        ([], "rollout.engine", ()),
    ],
)
def test_a_refusal_is_told_under_the_key_that_the_argument_comes_from(
    names: list[str], key: str, remedies: tuple[tuple[str, ...], ...]
) -> None:
    arguments: dict[str, object] = {
        **{"mem_fraction_static": 0.9, "context_length": 70, "enable_weights_cpu_backup": True},
        **{"page_size": 7, "chunked_prefill_size": 100},
    }
    refusal = {"names": names, "reason": "AssertionError: it does not divide", "fix": ""}
    violation = violation_of(refusal, arguments, "0.5.21")
    assert (violation.key, violation.remedies) == (key, remedies)
    assert "SGLang 0.5.21 refuses it: AssertionError: it does not divide" in str(violation)
    assert "Fix: " in str(violation)


SOURCES = ROOT / "hybridrl" / "workers" / "rollout" / "sglang"


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
    file = Path(__file__).parent / "sglang_answers" / f"{version}.json"
    answers: dict[str, Any] = json.loads(file.read_text())
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
        require_known_version({"version": "0.5.21.post1"})  # of a tested one
        require_known_version({"version": version})
        require_known_version({"version": version})
    (warning,) = warnings_in(caplog)
    assert f"SGLang {version} is not tested" in warning
    assert "tested are 0.5.21, 0.5.23" in warning


@pytest.mark.parametrize("answer", [{}, {"version": None}, {"version": "vLLM"}])
def test_what_is_no_sglang_is_refused(answer: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="is another program on its port"):
        require_known_version(answer)
