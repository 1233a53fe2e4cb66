from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config.model import LoraConfig
from hybridrl.workers.rollout.sglang.arguments import (
    ServingSpec,
    build_arguments,
    device_name,
    environment,
    show_devices,
)
from tests.config.values import config_of
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
    spec = spec_of(num_slots=7, memory_fraction=0.6, tensor_parallel_size=2)
    found = arguments_of(spec)
    expected = {
        "model_path": "model",
        "served_model_name": "me",
        "port": 20_000,
        "host": "127.0.0.1",
        "max_running_requests": 7,
        "mem_fraction_static": 0.6,
        "tp_size": 2,
        "disable_cuda_graph": False,
        "enable_memory_saver": True,
        "random_seed": 5,
        "load_format": "dummy",
    }
    assert {name: found[name] for name in expected} == expected


def test_whatever_else_is_given_passes_through_as_json_has_it() -> None:
    spec = spec_of(engine_args={"cuda_graph_bs": (1, 2), "schedule_policy": "lpm", "x": None})
    found = arguments_of(spec)
    assert (found["cuda_graph_bs"], found["schedule_policy"], found["x"]) == ([1, 2], "lpm", None)


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


def test_an_adapter_tells_its_rank_and_layers() -> None:
    found = arguments_of(spec_of(lora=config_of("lora=default").lora))
    assert (found["enable_lora"], found["max_lora_rank"]) == (True, 16)
    assert "q_proj" in str(found["lora_target_modules"])


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
