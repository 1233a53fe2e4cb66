from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.errors import ModelError
from hybridrl.models.load import (
    WeightFiles,
    build_empty_model,
    check_weights,
    fill_weights,
    finish_model,
)
from tests.models import make_tiny_model

CPU = torch.device("cpu")


def load(folder: Path) -> dict[str, Tensor]:
    model = build_empty_model(folder, dtype=torch.float32)
    files = WeightFiles(folder)
    check_weights(model, files)
    fill_weights(model, "", files, CPU)
    finish_model(model, CPU)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return {name: p.detach() for name, p in model.named_parameters()}


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


def test_weights_in_several_files_are_those_in_one(tmp_path: Path) -> None:
    one = make_tiny_model(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(one).save_pretrained(
        tmp_path / "many", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    whole, pieces = load(one), load(tmp_path / "many")
    assert list(whole) == list(pieces)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_loaded_weights_are_our_own_and_not_the_file(tmp_path: Path) -> None:
    weights = load(make_tiny_model(tmp_path))
    for tensor in weights.values():
        tensor.add_(1.0)  # a read-only memory map would end the process here
    assert not torch.equal(load(tmp_path)["model.norm.weight"], weights["model.norm.weight"])


def test_tied_weights_stored_twice_are_accepted(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, **{"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in load(folder)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere is no folder; set model.path"):
        build_empty_model(tmp_path / "nowhere", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"has no config.json; set model.path"):
        build_empty_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "holds no model_type"),
        ("[]", "holds no model_type"),
        ("{}", "holds no model_type"),
        (json.dumps({"model_type": "quen3"}), "did you mean 'qwen3'"),
        (json.dumps({"model_type": "gpt_neox"}), "known: llama, qwen2, qwen3"),
    ],
)
def test_an_unusable_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        build_empty_model(tmp_path, dtype=torch.float32)


def test_missing_left_over_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    change_weights(folder, **{"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"1 missing weights .* first: model.norm.weight"):
        load(folder)
    change_weights(folder, **{"model.norm.weight": torch.ones(32), "more": torch.ones(2)})
    with pytest.raises(ModelError, match=r"1 unexpected weights .* first: more"):
        load(folder)
    change_weights(folder, **{"model.norm.weight": torch.ones(33), "more": None})
    with pytest.raises(ModelError, match=r"model.norm.weight is \[33\], and .* \[32\]"):
        load(folder)


def test_missing_and_broken_weight_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="safetensors cannot be read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors; download"):
        load(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no model-00001-of-00002.safetensors"):
        load(folder)
