"""LoRA: only the adapter learns, under the names that peft and rollout engines know."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.model import LINEAR_MODULES
from hybridrl.errors import ModelError, RunFolderError
from hybridrl.metrics import Metrics
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.contract.layouts import on_layouts
from tests.contract.plain import weights_in
from tests.contract.ranks_under_test import Rank, RanksUnderTest, merge_metrics, take_step
from tests.tiny_models import DENSE
from tests.workers.train.engines import (
    assert_same_weights,
    make_rows,
    to_rollouts,
    update,
    weights_of,
    with_nan_advantage,
    with_optimizer,
)
from tests.workers.train.lora_engines import LORA, adapter_of, build_lora, with_lora

# The measure is FSDP2 on one rank, which adapts no experts.
pytestmark = on_layouts(lambda engine: engine.has_adapters, families=DENSE)

LIVELY = with_optimizer(lr=0.1, eps=1e-3)


@cache
def _train_alone(
    folder: Path, sync: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], Tensor]:
    """Three steps in this process: FSDP2 on one rank, which peft's own layers compute."""
    engine = build_lora(folder, lora=with_lora(sync=sync), config=LIVELY)
    norms = [update(engine, make_rows(11, seed=s))["policy/grad_norm"] for s in range(3)]
    frozen = engine.compute_logprobs(to_rollouts(make_rows(4)), temperature=1.0, use_adapter=False)
    return weights_of(engine), adapter_of(engine), norms, frozen.logprobs_BL.values()


def _train(
    rank: Rank, folder: Path, sync: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Metrics], Tensor | None]:
    lora = with_lora(sync=sync)
    engine = rank.policy(folder, LIVELY, lora=lora)
    base, start = weights_of(engine), adapter_of(engine)
    steps = [take_step(engine, make_rows(11, seed=seed), first=8) for seed in range(3)]
    assert all(not torch.equal(start[n], t) for n, t in adapter_of(engine).items())
    if sync == "adapter":
        assert_same_weights(weights_of(engine), base)
    before = adapter_of(engine)
    take_step(engine, with_nan_advantage(make_rows(5), row=4))
    assert_same_weights(adapter_of(engine), before)
    reference = rank.reference(folder, policy=engine, lora=lora)
    frozen = reference.compute_logprobs(to_rollouts(make_rows(4)), temperature=1.0)
    logprobs = frozen.logprobs_BL.values() if engine.is_output_rank else None
    return weights_of(engine), adapter_of(engine), steps, logprobs


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_adapter_learns_as_on_one_rank_and_base_is_frozen(
    ranks: RanksUnderTest, folder: Path, sync: str
) -> None:
    weights, adapter, norms, frozen = _train_alone(folder, sync)
    answers = ranks.run(_train, folder, sync)
    for step, norm in enumerate(norms):
        metrics = merge_metrics([answer[2][step] for answer in answers])
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
        num_trained = sum(tensor.numel() for tensor in adapter.values())
        assert metrics["policy/trained_parameters"] == num_trained
    for expected, place in ((weights, 0), (adapter, 1)):
        for answer in answers:
            assert answer[place].keys() == expected.keys()
            mine = {name: answer[place][name] for name in expected}
            # Steps this lively multiply the rounding of a gradient by 100.
            assert_same_weights(mine, expected, atol=5e-5)
    for answer in answers:
        if answer[3] is not None:  # the reference is the policy with its adapter switched off
            torch.testing.assert_close(answer[3], frozen, atol=2e-5, rtol=0)


def _begin(rank: Rank, folder: Path, seed: int) -> dict[str, Tensor]:
    engine, plain = rank.policy(folder, lora=LORA), rank.policy(folder)
    rollouts = to_rollouts(make_rows(5))
    one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (engine, plain))
    torch.testing.assert_close(one.logprobs_BL.values(), other.logprobs_BL.values())
    return adapter_of(engine)


def test_new_adapter_is_the_same_in_every_layout(ranks: RanksUnderTest, folder: Path) -> None:
    expected = adapter_of(build_lora(folder))
    for adapter in ranks.run(_begin, folder, 0):
        assert_same_weights({name: adapter[name] for name in expected}, expected)


def _stream(rank: Rank, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    lora = with_lora(target_modules=("q_proj", "down_proj"))
    engine = rank.policy(folder, lora=lora)
    assert engine.weight_sets == (WeightSet.BASE, WeightSet.ADAPTER)
    for part in engine.weight_sets:
        streamed = engine.full_weights(part)
        for spec, (name, t) in zip(engine.weight_specs(part), streamed, strict=True):
            assert (spec.name, spec.shape, spec.num_bytes) == (name, t.shape, t.nbytes)
    merged = rank.policy(folder, lora=with_lora(sync="merged"))
    assert merged.weight_sets == (WeightSet.BASE,)
    return weights_of(engine), adapter_of(engine)


@pytest.mark.shows("1.14")
def test_base_and_adapter_stream_under_external_names(ranks: RanksUnderTest, folder: Path) -> None:
    expected = weights_in(folder)
    for base, adapter in ranks.run(_stream, folder):
        assert base.keys() == expected.keys()
        assert_same_weights(base, {name: expected[name] for name in base})
        assert {*adapter} == {
            f"base_model.model.model.layers.{layer}.{module}.lora_{matrix}.weight"
            for layer in range(ranks.layout.num_layers)
            for module in ("self_attn.q_proj", "mlp.down_proj")
            for matrix in "AB"
        }


def _export(rank: Rank, folder: Path, target: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    engine = rank.policy(folder, LIVELY, lora=LORA)
    for seed in range(2):
        take_step(engine, make_rows(6, seed=seed), first=4)
    engine.export_adapter(target / "adapter")
    engine.export_hf(target / "hf")
    with pytest.raises(RunFolderError, match="adapter exists"):
        engine.export_adapter(target / "adapter")
    resumed = rank.policy(folder, lora=with_lora(init_from=str(target / "adapter")))
    assert_same_weights(adapter_of(resumed), adapter_of(engine))
    with pytest.raises(ModelError, match=r"no adapter.*lora\.enabled=true"):
        rank.policy(folder).export_adapter(target / "none")
    scored = engine.compute_logprobs(to_rollouts(make_rows(4)), temperature=1.0)
    return adapter_of(engine), scored.logprobs_BL.values() if engine.is_output_rank else None


def test_both_exports_load_and_an_adapter_starts_a_run(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path
) -> None:
    answers = ranks.run(_export, folder, tmp_path)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    assert sorted(settings["target_modules"]) == sorted(LINEAR_MODULES)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same_weights({name: stored[name] for name in answers[0][0]}, answers[0][0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "hf"]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(tokens).logits, merged(tokens).logits, atol=2e-5, rtol=1e-5
        )


def _rest(rank: Rank, folder: Path) -> None:
    resting, steady = (rank.policy(folder, lora=LORA) for _ in range(2))
    for seed in range(3):
        for engine in (resting, steady):
            take_step(engine, make_rows(5, seed=seed))
        for part in TrainState:
            resting.offload(part)
            assert resting.resident_bytes(part) == 0
        for part in TrainState:
            resting.restore(part)
    assert_same_weights(adapter_of(resting), adapter_of(steady))
    assert_same_weights(weights_of(resting), weights_of(steady))


def test_offloads_change_no_bit(ranks: RanksUnderTest, folder: Path) -> None:
    ranks.run(_rest, folder)
