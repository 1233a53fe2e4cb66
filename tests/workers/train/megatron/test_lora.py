from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.batch import TrainBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import LoraConfig
from hybridrl.errors import ModelError
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from tests.contract.layouts import EP2, SP2, TP2
from tests.megatron.engines import build_megatron
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    assert_same_weights,
    make_rows,
    rows_of,
    to_rollouts,
    update,
    weights_of,
)
from tests.workers.train.lora_engines import LORA, adapter_of, with_lora

Sizes = Mapping[str, Any]
NUM_ROWS = 8
ADAPTER_FILE = "adapter_model.safetensors"


def build(
    folder: Path, sizes: Sizes, lora: LoraConfig = LORA, config: ActorConfig = ACTOR
) -> PolicyEngine:
    return build_megatron(folder, config, lora=lora, **sizes)


def own_rows(engine: PolicyEngine, seed: int) -> TrainBatch:
    size = NUM_ROWS // engine.dp_size
    rows = make_rows(NUM_ROWS, seed=seed)
    return rows_of(rows, range(engine.dp_rank * size, (engine.dp_rank + 1) * size))


@dataclass(frozen=True, kw_only=True)
class Trained:
    logprobs: list[Tensor]
    norms: list[float]
    adapter: dict[str, Tensor]
    frozen: Tensor
    dp_rank: int
    is_output_rank: bool


def train(engine: PolicyEngine) -> Trained:
    base, bits = weights_of(engine), _frozen_bits(engine)
    logprobs, norms = [], []
    for seed in range(2):
        norms.append(update(engine, own_rows(engine, seed))["policy/grad_norm"])
        scored = engine.compute_logprobs(to_rollouts(own_rows(engine, 7)), temperature=0.9)
        logprobs.append(scored.logprobs_BL.values())
    assert_same_weights(weights_of(engine), base)
    assert all(torch.equal(one, two) for one, two in zip(bits, _frozen_bits(engine), strict=True))
    reference = BaseModelReference(engine)
    frozen = reference.compute_logprobs(to_rollouts(own_rows(engine, 7)), temperature=0.9)
    return Trained(
        logprobs=logprobs,
        norms=norms,
        adapter=adapter_of(engine),
        frozen=frozen.logprobs_BL.values(),
        dp_rank=engine.dp_rank,
        is_output_rank=engine.is_output_rank,
    )


def _frozen_bits(engine: PolicyEngine) -> list[Tensor]:
    """Copy the frozen weights of this rank, padding of the vocabulary included."""
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    assert isinstance(engine.backend, MegatronBackend)
    named = engine.backend.stages.named_tensors()
    return [p.detach().clone() for _, p in named if not p.requires_grad]


def assert_same_training(ranks: list[Trained], wanted: Trained) -> None:
    leading = sorted((t for t in ranks if t.is_output_rank), key=lambda trained: trained.dp_rank)
    for step in range(2):
        logprobs = torch.cat([trained.logprobs[step] for trained in leading])
        torch.testing.assert_close(logprobs, wanted.logprobs[step], atol=1e-5, rtol=0)
    frozen = torch.cat([trained.frozen for trained in leading])
    torch.testing.assert_close(frozen, wanted.frozen, atol=1e-5, rtol=0)
    for trained in ranks:
        assert trained.norms == pytest.approx(wanted.norms, rel=1e-5)
        assert_same_weights(trained.adapter, wanted.adapter, atol=1e-5)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    return make_tiny_model(folder, "qwen3_moe", tie_embeddings=False)


EXPERTS = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _train_sparse(
    _rank: int, folder: Path, sizes: Sizes, targets: tuple[str, ...], start: Path
) -> Trained:
    lora = with_lora(target_modules=targets, init_from=str(start))
    engine = build(folder, sizes, lora, replace(ACTOR, gradient_checkpointing=bool(sizes)))
    trained = train(engine)
    rollouts = to_rollouts(own_rows(engine, 7))
    plain = build_megatron(folder, **sizes).compute_logprobs(rollouts, temperature=0.9)
    if engine.is_output_rank:
        assert torch.equal(trained.frozen, plain.logprobs_BL.values())
        assert (trained.logprobs[1] - trained.frozen).abs().max() > 0.1
    return trained


def _start_and_train_sparse(
    rank: int, folder: Path, targets: tuple[str, ...], start: Path
) -> Trained:
    engine = build(folder, {}, with_lora(target_modules=targets))
    assert all(t.any() == ("lora_A" in name) for name, t in adapter_of(engine).items())
    update(engine, make_rows(32, seed=3))  # gives B values
    engine.export_adapter(start)
    return _train_sparse(rank, folder, {}, targets, start)


@pytest.mark.parametrize(
    ("family", "targets", "sizes", "num_adapted"),
    [
        # Four experts in a layer, and one for all tokens.
        ("qwen2_moe", ("all-linear",), {**SP2, **EP2}, 4 + 5 * 3),
        ("qwen3_moe", EXPERTS, EP2, 4 * 3),
        ("mixtral", ATTENTION, {**SP2, **EP2}, 4),
    ],
    ids=["all", "experts alone", "attention alone"],
)
def test_adapters_of_mixtures_learn_alike_on_sharing_ranks(
    tmp_path: Path, family: Family, targets: tuple[str, ...], sizes: Sizes, num_adapted: int
) -> None:
    all_sparse: dict[str, Any] = {"mlp_only_layers": []} if family == "qwen2_moe" else {}
    model = make_tiny_model(tmp_path / "model", family, tie_embeddings=False, **all_sparse)
    start = tmp_path / "start"
    [alone] = run_ranks(1, _start_and_train_sparse, model, targets, start)
    started = load_file(start / ADAPTER_FILE)
    assert len(started) == 2 * 2 * num_adapted
    assert all(not torch.equal(alone.adapter[name], tensor) for name, tensor in started.items())
    assert_same_training(run_ranks(2, _train_sparse, model, sizes, targets, start), alone)


def _merge_sparse(_rank: int, folder: Path, target: Path) -> None:
    engine = build(folder, EP2)
    for seed in range(2):
        update(engine, own_rows(engine, seed))
    engine.export_hf(target / "hf")
    engine.export_adapter(target / "adapter")


def test_expert_export_includes_merged_adapters(sparse: Path, tmp_path: Path) -> None:
    run_ranks(2, _merge_sparse, sparse, tmp_path)
    adapter = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for name, weight in load_file(sparse / "model.safetensors").items():
        beside = f"base_model.model.{name.removesuffix('.weight')}"
        delta = torch.zeros(())
        if f"{beside}.lora_A.weight" in adapter:
            delta = 2 * adapter[f"{beside}.lora_B.weight"] @ adapter[f"{beside}.lora_A.weight"]
            assert delta.abs().max() > 1e-3
        torch.testing.assert_close(exported[name], weight + delta, atol=1e-6, rtol=0)


def _train_in_bfloat16(_rank: int, folder: Path) -> None:
    config = replace(ACTOR, compute_dtype="bfloat16")
    engine = build(folder, TP2, config=config)
    started = adapter_of(engine)
    assert {tensor.dtype for _, tensor in engine.full_weights()} == {torch.bfloat16}
    for seed in range(2):
        assert update(engine, own_rows(engine, seed))["policy/grad_norm"] > 0
    moved = adapter_of(engine)
    assert {tensor.dtype for tensor in moved.values()} == {torch.float32}
    assert all(not torch.equal(moved[name], started[name]) for name in started)


def test_adapters_are_float32_beside_a_bfloat16_model(tiny_model: Path) -> None:
    run_ranks(2, _train_in_bfloat16, tiny_model)


def _refuse(_rank: int, folder: Path, sparse: Path) -> None:
    with pytest.raises(ModelError, match=r"lora\.rank=17 .*k_proj, 32 inputs and 16 outputs.*=16"):
        build(folder, TP2, with_lora(rank=17))
    with pytest.raises(ModelError, match=r"contains c_attn, and qwen3 has no such"):
        build(folder, TP2, with_lora(target_modules=("c_attn", "q_proj")))
    sizes = {**SP2, "expert_tensor_parallel_size": 2}
    attention = with_lora(target_modules=("q_proj",))
    assert update(build(sparse, sizes, attention), make_rows(NUM_ROWS))["policy/grad_norm"] > 0


@pytest.mark.shows("1.12")
def test_what_does_not_fit_is_refused_by_name(tiny_model: Path, sparse: Path) -> None:
    run_ranks(2, _refuse, tiny_model, sparse)
