from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridrl.errors import ModelError, PhaseError
from hybridrl.models.architecture import MLP_MODULES, read_architecture
from hybridrl.workers.train.policy_engine import BaseModelReference
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.ranks import run_ranks
from tests.tiny_models import SPARSE, TRAINED, Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    assert_same_weights,
    build_fsdp2,
    fsdp2_of,
    make_rows,
    to_rollouts,
    update,
)
from tests.workers.train.lora_engines import LORA, adapter_of, build_lora, randomize, with_lora


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


def test_only_the_adapter_has_gradients_and_moments(tiny_model: Path) -> None:
    engine = build_lora(tiny_model)
    update(engine, make_rows(6))
    adapter_bytes = sum(spec.num_bytes for spec in engine.weight_specs(WeightSet.ADAPTER))
    num_step_counters = 4 * len(adapter_of(engine))
    moments = engine.resident_bytes(TrainState.OPTIMIZER)
    assert moments == 2 * adapter_bytes + num_step_counters
    trainable = [p for p in fsdp2_of(engine).model.parameters() if p.requires_grad]
    assert sum(p.nbytes for p in trainable) == adapter_bytes
    assert set(fsdp2_of(engine).optimizer.adamw.state) == set(trainable)


def test_an_offloaded_adapter_is_not_exported(tiny_model: Path, tmp_path: Path) -> None:
    engine = build_lora(tiny_model)
    engine.offload(TrainState.PARAMETERS)
    with pytest.raises(PhaseError, match=r"export_adapter\(\) needs parameters"):
        engine.export_adapter(tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


def test_reference_is_the_policy_without_its_adapter(tiny_model: Path) -> None:
    engine, plain = build_lora(tiny_model), build_fsdp2(tiny_model)
    reference = BaseModelReference(engine)
    rollouts = to_rollouts(make_rows(5))
    for seed in range(2):
        update(engine, make_rows(5, seed=seed))
        policy = engine.compute_logprobs(rollouts, temperature=0.7).logprobs_BL.values()
        frozen = reference.compute_logprobs(rollouts, temperature=0.7).logprobs_BL.values()
        loaded = plain.compute_logprobs(rollouts, temperature=0.7).logprobs_BL.values()
        again = engine.compute_logprobs(rollouts, temperature=0.7).logprobs_BL.values()
        assert torch.equal(frozen, loaded)
        assert torch.equal(policy, again)
        assert not torch.equal(policy, frozen)


def test_the_adapter_starts_from_the_seed(tiny_model: Path) -> None:
    one, same, other = (adapter_of(build_lora(tiny_model, seed=seed)) for seed in (3, 3, 4))
    assert_same_weights(one, same)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]) == ("lora_B" in name)
        assert tensor.any() == ("lora_A" in name)
        if "lora_A" in name:  # kaiming with a = sqrt(5): uniform up to 1 / sqrt(inputs)
            assert 0.8 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1


@pytest.mark.shows("1.14")
@pytest.mark.parametrize(
    ("family", "tie_embeddings"),
    [
        pytest.param(family, tie, marks=[pytest.mark.nightly] * (tie is (place % 2 == 0)))
        for place, family in enumerate(TRAINED)
        for tie in (True, False)
    ],
)
def test_both_exports_give_the_same_logits_in_peft(
    tmp_path: Path, family: Family, tie_embeddings: bool, record_property: Callable[..., None]
) -> None:
    source = make_tiny_model(tmp_path / "model", family, tie_embeddings=tie_embeddings)
    sizes = read_architecture(source).linear_sizes
    names = tuple(n for n in sizes if family not in SPARSE or n not in MLP_MODULES)
    engine = build_lora(source, lora=replace(LORA, target_modules=names))
    randomize(engine)
    engine.export_hf(tmp_path / "hf")
    engine.export_adapter(tmp_path / "adapter")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "hf", "model"]
    base = AutoModelForCausalLM.from_pretrained(source)
    untrained = logits_of(base)
    adapted = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (adapted - untrained).abs().max() > 0.1
    record_property("lora", float((adapted - merged).abs().max()))
    rollouts = to_rollouts(make_rows(3))
    ours = engine.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
    loaded = build_fsdp2(tmp_path / "hf").compute_logprobs(rollouts, temperature=1.0)
    torch.testing.assert_close(ours, loaded.logprobs_BL.values(), rtol=1e-4, atol=1e-4)


def _train_in_bfloat16(rank: int, folder: Path) -> None:
    config = replace(ACTOR, compute_dtype="bfloat16")
    engine = build_lora(folder, dtype="bfloat16", config=config)
    assert {t.dtype for _, t in engine.full_weights()} == {torch.bfloat16}
    for seed in range(2):
        assert update(engine, make_rows(6, seed=seed))["policy/grad_norm"] > 0
    assert {t.dtype for t in adapter_of(engine).values()} == {torch.float32}
    merged = build_lora(folder, dtype="bfloat16", config=config, lora=with_lora(sync="merged"))
    assert {t.dtype for _, t in merged.full_weights()} == {torch.bfloat16}


def test_adapters_are_float32_beside_a_bfloat16_model(tiny_model: Path) -> None:
    run_ranks(2, _train_in_bfloat16, tiny_model)


def test_checkpointed_activations_change_no_bit(tiny_model: Path) -> None:
    again = build_lora(tiny_model, config=replace(ACTOR, gradient_checkpointing=True))
    steady = build_lora(tiny_model)
    for seed in range(3):
        for engine in (again, steady):
            update(engine, make_rows(5, seed=seed))
    assert_same_weights(adapter_of(again), adapter_of(steady))


@pytest.mark.shows("1.12")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 17}, r"lora\.rank=17 .*k_proj, 32 inputs and 16 outputs.*=16"),
        (
            {"target_modules": ("c_attn", "q_proj")},
            r"contains c_attn, and Qwen3ForCausalLM has no such",
        ),
    ],
)
def test_a_rank_or_a_module_that_does_not_fit_is_rejected(
    tiny_model: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        build_lora(tiny_model, lora=with_lora(**changes))


@pytest.mark.parametrize("fault", ["rank", "modules", "torn", "missing"])
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    stored = tmp_path / "adapter"
    settings: dict[str, dict[str, Any]] = {
        "rank": {"rank": 2},
        "modules": {"target_modules": ("q_proj",)},
    }
    build_lora(tiny_model, lora=with_lora(**settings.get(fault, {}))).export_adapter(stored)
    weights = stored / "adapter_model.safetensors"
    if fault == "torn":
        weights.write_bytes(weights.read_bytes()[:-7])
    if fault == "missing":
        weights.unlink()
    words = {"rank": r"is \[2, 32\], and this model with lora.rank needs \[4, 32\]"}
    with pytest.raises(ModelError, match=words.get(fault, "cannot be read.*lora.init_from")):
        build_lora(tiny_model, lora=with_lora(init_from=str(stored)))


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e300])
def test_adapter_with_nan_names_its_file(tiny_model: Path, tmp_path: Path, value: float) -> None:
    stored = tmp_path / "adapter"
    build_lora(tiny_model).export_adapter(stored)
    file = stored / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name] = tensors[name].double()  # 1e300 is infinite as float32
    tensors[name][0, 1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    words = rf"{re.escape(str(file))}: {re.escape(name)} contains NaN .*set lora\.init_from"
    with pytest.raises(ModelError, match=words):
        build_lora(tiny_model, lora=with_lora(init_from=str(stored)))
