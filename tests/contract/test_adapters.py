from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.model import LINEAR_MODULES
from hybridrl.errors import ModelError, RunFolderError
from hybridrl.metrics import Metrics
from hybridrl.workers.train.protocol import WeightSet
from tests.contract.layouts import on_layouts
from tests.contract.plain import weights_in
from tests.contract.ranks_under_test import Rank, RanksUnderTest, take_step
from tests.contract.steps import merged_steps
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
    for metrics, norm in zip(merged_steps([a[2] for a in answers]), norms, strict=True):
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
        num_trained = sum(tensor.numel() for tensor in adapter.values())
        assert metrics["policy/trained_parameters"] == num_trained
    for own_weights, own_adapter, _, logprobs in answers:
        # Steps this lively multiply the rounding of a gradient by 100.
        assert_same_weights(own_weights, weights, atol=5e-5)
        assert_same_weights(own_adapter, adapter, atol=5e-5)
        if logprobs is not None:  # the reference is the policy with its adapter switched off
            torch.testing.assert_close(logprobs, frozen, atol=2e-5, rtol=0)


def _begin(rank: Rank, folder: Path) -> dict[str, Tensor]:
    engine, plain = rank.policy(folder, lora=LORA), rank.policy(folder)
    rollouts = to_rollouts(make_rows(5))
    one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (engine, plain))
    torch.testing.assert_close(one.logprobs_BL.values(), other.logprobs_BL.values())
    return adapter_of(engine)


def test_new_adapter_is_the_same_in_every_layout(ranks: RanksUnderTest, folder: Path) -> None:
    expected = adapter_of(build_lora(folder))
    for adapter in ranks.run(_begin, folder):
        assert_same_weights(adapter, expected)


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
        assert_same_weights(base, expected)
        assert {*adapter} == {
            f"base_model.model.model.layers.{layer}.{module}.lora_{matrix}.weight"
            for layer in range(ranks.layout.num_layers)
            for module in ("self_attn.q_proj", "mlp.down_proj")
            for matrix in "AB"
        }


def _export(rank: Rank, folder: Path, target: Path) -> dict[str, Tensor]:
    lora = with_lora(use_rslora=True)
    engine = rank.policy(folder, LIVELY, lora=lora)
    merging = rank.policy(folder, LIVELY, lora=replace(lora, sync="merged"))
    for seed in range(2):
        for each in (engine, merging):
            take_step(each, make_rows(6, seed=seed), first=4)
    engine.export_adapter(target / "adapter")
    engine.export_hf(target / "hf")
    dist.barrier()
    merged, stored = weights_of(merging), weights_in(target / "hf")
    assert_same_weights(merged, {name: stored[name] for name in merged})
    with pytest.raises(RunFolderError, match="adapter exists"):
        engine.export_adapter(target / "adapter")
    resumed = rank.policy(folder, lora=replace(lora, init_from=str(target / "adapter")))
    assert_same_weights(adapter_of(resumed), adapter_of(engine))
    with pytest.raises(ModelError, match=r"no adapter.*lora\.enabled=true"):
        rank.policy(folder).export_adapter(target / "none")
    return adapter_of(engine)


@pytest.mark.shows("1.14")
def test_both_exports_load_and_an_adapter_starts_a_run(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path
) -> None:
    adapter = ranks.run(_export, folder, tmp_path)[0]
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 8.0, True)
    assert sorted(settings["target_modules"]) == sorted(LINEAR_MODULES)
    assert_same_weights(load_file(tmp_path / "adapter/adapter_model.safetensors"), adapter)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "hf"]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert_same_weights(adapted, merged, atol=1e-6)
    changed = [name for name in before if not torch.equal(before[name], merged[name])]
    assert len(changed) == ranks.layout.num_layers * len(LINEAR_MODULES)
