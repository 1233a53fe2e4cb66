"""Whole runs with LoRA on real Ray workers."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.errors import ConfigErrors
from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

LORA = ("lora=default", "lora.rank=4", "actor.optimizer.lr=1e-2")


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(48, 58)[None]).logits


def _check_exports(folder: Path) -> None:
    """The adapter beside the model that the run started from is the merged model."""
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    started_from = _logits(base)
    adapted = _logits(peft.PeftModel.from_pretrained(base, folder / "adapter"))
    merged = _logits(AutoModelForCausalLM.from_pretrained(folder / "hf"))
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, started_from, atol=1e-4)


@pytest.mark.shows("1.4", "1.8")
@pytest.mark.parametrize(
    ("sync", "sleep", "num_ranks"),
    [
        ("adapter", "true", 2),
        pytest.param("merged", "true", 1, marks=pytest.mark.nightly),
        pytest.param("adapter", "false", 1, marks=pytest.mark.nightly),
        pytest.param("merged", "false", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_run_trains_an_adapter_and_leaves_it_alone_and_merged(
    tmp_path: Path, sync: str, sleep: str, num_ranks: int
) -> None:
    folder = tmp_path / "run"
    _, first, second, last = train(
        folder,
        *(*LORA, VARIED, f"lora.sync={sync}", f"rollout.sleep={sleep}"),
        f"cluster.num_ranks_per_node={num_ranks}",
        *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
    )
    _check_exports(folder)
    assert first["policy/updates"] == last["policy/updates"] == 1
    adapter = load_file(folder / "adapter/adapter_model.safetensors").values()
    assert last["policy/trained_parameters"] == sum(tensor.numel() for tensor in adapter)
    kl = "policy/kl_to_reference_nats/mean"
    assert first[kl] == pytest.approx(0.0, abs=1e-9)
    assert last[kl] > 1e-6
    assert last["policy/sampler_mismatch_nats/max"] < 1e-4
    weights = load_file(folder / "hf/model.safetensors").values()
    base_bytes, adapter_bytes = (sum(t.nbytes for t in tensors) for tensors in (weights, adapter))
    sent = [line["memory/synced_bytes"] / num_ranks for line in (first, second)]
    num_syncs = 2 if sleep == "true" and sync == "merged" else 1  # evaluation slept in between
    expected = [num_syncs * base_bytes, base_bytes]
    if sync == "adapter":
        expected = [base_bytes + adapter_bytes, adapter_bytes]
    assert sent == expected


def test_a_run_goes_on_from_the_adapter_of_another(tmp_path: Path) -> None:
    tuning = ("mode=sft", "trainer.num_steps=4", "trainer.num_prompts_per_step=8")
    train(tmp_path / "one", *LORA, *tuning)
    _check_exports(tmp_path / "one")
    start = f"lora.init_from={tmp_path / 'one/adapter'}"
    train(tmp_path / "two", *LORA, start, "trainer.num_steps=1")
    before, after = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("one", "two")
    )
    assert all(bool(tensor.any()) for tensor in before.values())
    for name, tensor in before.items():  # nothing was rewarded, so the step had no gradient
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0.03)
    with pytest.raises(ConfigErrors, match=r"lora\.rank=8: the adapter .* was made with 4"):
        small_config(tmp_path / "three", *LORA, start, "lora.rank=8")
