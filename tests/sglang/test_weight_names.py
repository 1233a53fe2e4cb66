from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config.model import SGLANG_MODEL_TYPES
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.models.experts import StoredNames
from hybridrl.models.load import build_empty_model
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.arguments import environment
from hybridrl.workers.rollout.sglang.broadcast import WeightGroup
from hybridrl.workers.rollout.sglang.memory import base_shapes
from hybridrl.workers.rollout.sglang.transports import DiskTransport
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.train.protocol import WeightSet
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B
from tests.sglang import fake_loading
from tests.sglang.engines import recorded_engine, server_spec, sync, weights_of
from tests.sglang.recorded_server import calls_in
from tests.sglang.warm import run_forked
from tests.tiny_models import TRAINED, Family, make_tiny_model
from tests.workers.rollout.engines import make_prompts, sampling_params, stop
from tests.workers.train.engines import build_fsdp2
from tests.workers.train.lora_engines import LORA

Case = dict[str, Any]

Variants = dict[str, tuple[Family, dict[str, object]]]

SERVED: Variants = {
    **{
        family: (family, {"tie_embeddings": False})
        for family in TRAINED
        if family in (*SGLANG_MODEL_TYPES, "phi3")
    },
    "qwen3, tied": ("qwen3", {"tie_embeddings": True}),
    "gemma3_text": ("gemma3_text", {"tie_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"tie_embeddings": False, "mlp_only_layers": []}),
}
"""``SGLANG_MODEL_TYPES``, and Phi-3, whose samples differ."""

NOT_SERVED: Variants = {
    "gemma3_text, not tied": ("gemma3_text", {"tie_embeddings": False}),
    "qwen3_moe, tied": ("qwen3_moe", {"tie_embeddings": True}),
    "qwen2_moe, a layer without experts": ("qwen2_moe", {"tie_embeddings": False}),
}
"""Refused by ``check_server_computes_the_model``, gemma3_text as a family."""

REAL = {"Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}


def tiny_case(folder: Path, family: Family, changes: dict[str, Any]) -> Case:
    """What a trained model streams by its own list, which the files confirm."""
    make_tiny_model(folder, family, **changes)
    specs = build_fsdp2(folder).weight_specs(WeightSet.BASE)
    assert {spec.name: spec.shape for spec in specs} == base_shapes(folder)
    weights = [(spec.name, list(spec.shape)) for spec in specs]
    return {"folder": str(folder), "dtype": "bfloat16", "bucket_bytes": 2**14, "weights": weights}


def real_case(folder: Path, settings: dict[str, object]) -> Case:
    """Two layers of a published model: the names and shapes of its parameters, without memory."""
    folder.mkdir()
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    whole = settings | {"num_hidden_layers": 2, "dtype": "bfloat16"}
    whole["architectures"] = [architecture[str(settings["model_type"])]]
    (folder / "config.json").write_text(json.dumps(whole))
    names = StoredNames(str(settings["model_type"]))
    weights = [
        (stored, list(shape))
        for name, parameter in build_empty_model(folder, dtype=torch.bfloat16).named_parameters()
        for stored, shape in names.shapes(name, parameter.shape)
    ]
    return {"folder": str(folder), "dtype": "bfloat16", "bucket_bytes": 2**29, "weights": weights}


Spoil = Callable[[Case], Case]


def _without(name: str, case: Case) -> Case:
    return case | {"weights": [each for each in case["weights"] if each[0] != name]}


def _renamed(old: str, new: str, case: Case) -> Case:
    weights = [(name.replace(old, new), shape) for name, shape in case["weights"]]
    return case | {"weights": weights}


def _transposed(name: str, case: Case) -> Case:
    weights = [(each, shape[::-1] if each == name else shape) for each, shape in case["weights"]]
    return case | {"weights": weights}


def _in_float32(case: Case) -> Case:
    return case | {"sent": "float32"}


LAYER = "model.layers.1"
FAULTS: dict[str, tuple[Family, Spoil, str]] = {
    "a matrix is dropped": (
        "qwen3",
        partial(_without, f"{LAYER}.self_attn.q_proj.weight"),
        f"{LAYER}.self_attn.qkv_proj.weight: 1024 of 2048 numbers were written",
    ),
    "an expert is misspelled": (
        "qwen3_moe",
        partial(_renamed, "experts.3.up_proj", "experts.3.up"),
        f"{LAYER}.mlp.experts.3.up.weight: 0 of 2048 bytes were loaded",
    ),
    "a matrix is transposed": (
        "llama",
        partial(_transposed, f"{LAYER}.mlp.down_proj.weight"),
        "AssertionError",
    ),
    "an expert is transposed": (
        "qwen2_moe",
        partial(_transposed, f"{LAYER}.mlp.experts.0.down_proj.weight"),
        "[24, 24] torch.bfloat16 to [32, 24] torch.bfloat16",
    ),
    "another type is sent": ("qwen2", _in_float32, "torch.float32 to"),
}
BAD_CALLS: list[tuple[str, dict[str, object], str]] = [
    ("/begin_weight_updates", {}, "there is no such route"),
    ("/pause_generation", {"mode": "sleep"}, "Input should be 'abort'"),
    ("/weights_checker", {"actions": "compare"}, "actions would be ignored"),
    ("/release_memory_occupation", {"tags": "weights"}, "Input should be a valid list"),
    ("/generate", {"input_ids": [1], "rids": "1"}, "rids would be ignored"),
    ("/generate", {"input_ids": [1], "sampling_params": {"sampling_seeds": 1}}, "sampling_seeds"),
    ("/generate", {"input_ids": [1], "sampling_params": {"top_p": 2.0}}, "top_p must be in"),
]


def sent_by_a_run(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Any]]:
    """Every kind of call that an engine makes in a step, with adapter, proof and each transport."""
    spec = replace(server_spec(folder, returns_experts=True), lora=LORA)
    shapes = adapter_shapes(base_shapes(folder), LORA)
    # It claims what a GPU would do, so that all is asked of it.
    changes = {"enable_return_routed_experts": True}
    with recorded_engine(spec, calls, monkeypatch, changes) as engine:
        stop(engine)
        for part in MemoryTag:
            engine.release(part)
        for part in MemoryTag:
            engine.resume(part)
        engine.load_reference_weights(folder)
        sync(engine, weights_of(folder), version=1)
        engine.verify_weights()
        engine.pause()
        adapter = {name: torch.zeros(shape) for name, shape in shapes.items()}
        engine.load_adapter(adapter, version=1)
        engine.continue_generation()
        with suppress(Exception):  # what it answers is no response
            engine.run(single_turn(make_prompts((3,)), sampling_params(group=2, stop=(5,))))
        engine.pause()
        engine.unload_adapter()
        group = LonelyGroup(timeout_s=10.0)
        group.join({0: engine.join()}, device=torch.device("cpu"))
        group.send(list(weights_of(folder).items()))
        group.finish()
        group.leave()
        engine.finish_update(version=2)
        engine.transport = DiskTransport(is_sender=True, dtype=torch.float32)
        sync(engine, weights_of(folder), version=2)
    return calls_in(calls)


class LonelyGroup(WeightGroup):
    """Its servers answer, and never come."""

    def _form(self, host: str, size: int) -> None:
        assert size == 2


ROUTES = {
    *("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"),
    *("/begin_weight_update", "/end_weight_update", "/update_weight_version", "/generate"),
    *("/update_weights_from_tensor", "/update_weights_from_disk"),
    *("/init_weights_update_group", "/update_weights_from_distributed"),
    *("/destroy_weights_update_group", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
}
"""All that an engine's control calls and requests are."""


@dataclass(frozen=True, slots=True)
class Found:
    """What SGLang made of everything, faults of the test's own included."""

    faults: dict[str, list[str]]
    refused: list[list[str]]
    """By call."""

    calls: list[tuple[str, Any]]
    """The first are those of a run, BAD_CALLS the others."""


@pytest.fixture(scope="module")
def found(warm_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases and calls, shown to SGLang in one process."""
    folder = tmp_path_factory.mktemp("names")
    cases = {
        name: tiny_case(folder / name, family, changes)
        for name, (family, changes) in {**SERVED, **NOT_SERVED}.items()
    }
    cases |= {name: real_case(folder / name, settings) for name, settings in REAL.items()}
    cases |= {name: spoil(cases[family]) for name, (family, spoil, _) in FAULTS.items()}
    with pytest.MonkeyPatch.context() as patches:
        calls = sent_by_a_run(folder / "qwen3_moe", folder / "calls.jsonl", patches)
    calls += [(path, body) for path, body, _ in BAD_CALLS]
    asked, answer = folder / "asked.json", folder / "answer.json"
    asked.write_text(json.dumps({"cases": list(cases.values()), "calls": calls}))
    run_forked(fake_loading.__name__, asked, answer, variables=environment(server_spec(folder)))
    said = json.loads(answer.read_text())
    return Found(dict(zip(cases, said["faults"], strict=True)), said["refused"], calls)


@pytest.mark.timeout(150)
def test_every_streamed_tensor_has_its_place_and_one_missing_misnamed_or_misshapen_is_found(
    found: Found,
) -> None:
    faults = {name: found.faults[name] for name in (*SERVED, *REAL)}
    assert {name: each for name, each in faults.items() if each} == {}
    for name in NOT_SERVED:
        assert any(": 0 of" in line for line in found.faults[name]), (name, found.faults[name])
    for name, (_, _, fault) in FAULTS.items():
        assert any(fault in line for line in found.faults[name]), (name, found.faults[name])


@pytest.mark.timeout(150)
def test_sglang_takes_every_body_that_an_engine_sends_and_would_refuse_others(found: Found) -> None:
    sent = found.calls[: -len(BAD_CALLS)]
    assert {path.partition("?")[0] for path, _ in sent} == ROUTES
    assert [each for each in found.refused[: len(sent)] if each] == []
    lines = found.refused[-len(BAD_CALLS) :]
    for (path, _, fault), faults in zip(BAD_CALLS, lines, strict=True):
        assert any(fault in line for line in faults), (path, faults)
