from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from hybridrl.errors import ModelError
from hybridrl.models.load import (
    ModelFiles,
    WeightFiles,
    build_empty_model,
    check_weights,
    fill_weights,
    finish_model,
    require_usable_model,
)
from tests.tiny_models import SPARSE, Family, make_mxfp4_model, make_tiny_model

CPU = torch.device("cpu")


def load(folder: Path) -> dict[str, Tensor]:
    model = build_empty_model(folder, dtype=torch.float32)
    files = WeightFiles(folder)
    check_weights(model, files)
    fill_weights(model, "", ModelFiles(files, model.config.model_type), CPU)
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_travel_in_their_stored_type_and_become_the_same_numbers(
    family: Family, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family)
    halves = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    model = build_empty_model(folder, dtype=torch.float32)
    files = ModelFiles(WeightFiles(folder), family)
    for name, parameter in model.named_parameters():
        assert files.read(name, shape=parameter.shape).dtype == torch.bfloat16, name
    converted_first = {n: t.float() for n, t in halves.items()}
    loaded = load(folder)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    save_file(converted_first, folder / "model.safetensors")
    whole = load(folder)
    assert all(torch.equal(whole[name], loaded[name]) for name in whole)


def test_experts_of_two_types_lose_no_bits(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe")
    whole = load(folder)
    last = max(name for name in load_file(folder / "model.safetensors") if ".experts." in name)
    change_weights(folder, **{last: load_file(folder / "model.safetensors")[last].double()})
    assert all(torch.equal(whole[name], tensor) for name, tensor in load(folder).items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ["qwen3"]}', "holds no model_type"),
        ('{"model_type": "qwen3", "hidden_act": 5}', r"transformers cannot read .*config\.json"),
        (
            '{"model_type": "qwen3", "vocab_size": 64, "pad_token_id": 64}',
            "pad_token_id=64 is not in the vocabulary of vocab_size=64",
        ),
        (
            '{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}',
            "weights are quantised",
        ),
        (json.dumps({"model_type": "quen3"}), "did you mean 'qwen3'"),
        (json.dumps({"model_type": "bloom"}), "known: .*mistral, mixtral, olmo2"),
    ],
)
def test_an_unusable_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    for folder, missing in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "has no config")):
        with pytest.raises(ModelError, match=rf"{missing}.*; set model.path"):
            build_empty_model(folder, dtype=torch.float32)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        build_empty_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "cannot be read"),
        ("[]", "holds a JSON list"),
        ("{}", "weight_map is None, must name the file"),
        ('{"weight_map": {"model.norm.weight": 5}}', r"weight_map\['model.norm.weight'\]=5 is no"),
        ('{"weight_map": {"model.norm.weight": "../x.safetensors"}}', "is no file beside it"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str, words: str) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    for read in (load, require_usable_model):
        with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json.* {words}"):
            read(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path)
    require_usable_model(folder)
    change_weights(folder, **{"model.norm.weight": torch.ones(32).to(dtype)})
    for read in (load, require_usable_model):
        with pytest.raises(
            ModelError, match=r"model\.safetensors: model\.norm\.weight is .*quantis"
        ):
            read(folder)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
)
def test_nan_weights_name_their_file(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    spoilt = load_file(folder / "model.safetensors")[name].to(dtype)
    spoilt[3, 5] = value
    change_weights(folder, **{name: spoilt})
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} contains NaN or infinity"):
        load(folder)
    files = WeightFiles(folder)
    with pytest.raises(ModelError, match=f"{name} contains NaN"):
        files.read_range(name, [(3, 4), (0, 32)])
    assert files.read_range(name, [(0, 3), (0, 32)]).isfinite().all()


def test_a_tied_head_with_values_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, **{"lm_head.weight": embedding.clone()})
    require_usable_model(folder)
    assert "lm_head.weight" not in load(folder)
    other = embedding.clone()
    other[-1, -1] += 1.0
    for head in (other, embedding[:-1].clone()):
        change_weights(folder, **{"lm_head.weight": head})
        with pytest.raises(ModelError, match="the files contain another lm_head"):
            require_usable_model(folder)
    untied = make_tiny_model(tmp_path / "untied", tie_embeddings=False)
    require_usable_model(untied)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "model.norm.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ],
)
def test_missing_and_unexpected_weights_are_named(
    tmp_path: Path, family: Family, name: str
) -> None:
    folder = make_tiny_model(tmp_path, family)
    good = load_file(folder / "model.safetensors")[name]
    change_weights(folder, **{name: None})
    with pytest.raises(ModelError, match=f"1 missing: {name}"):
        load(folder)
    change_weights(folder, **{name: good, "more": torch.ones(2)})
    with pytest.raises(ModelError, match=r"1 not of this model: more"):
        load(folder)
    first, *others = good.shape
    change_weights(folder, **{name: torch.ones(first + 1, *others), "more": None})
    wrong, right = re.escape(str([first + 1, *others])), re.escape(str([first, *others]))
    with pytest.raises(ModelError, match=f"{name} is {wrong}, and .* {right}"):
        load(folder)


@pytest.mark.parametrize("family", SPARSE)
def test_experts_load_one_by_one_or_fused(family: Family, tmp_path: Path) -> None:
    one = make_tiny_model(tmp_path / "one", family)
    model = AutoModelForCausalLM.from_pretrained(one)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = WeightFiles(tmp_path / "fused").names
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    separate, fused = load(one), load(tmp_path / "fused")
    for name, parameter in model.named_parameters():
        assert torch.equal(separate[name], parameter), name
        assert torch.equal(fused[name], parameter), name


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


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    folder = make_mxfp4_model(tmp_path)
    require_usable_model(folder)
    read = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    model = build_empty_model(folder, dtype=torch.bfloat16)
    files = WeightFiles(folder)
    check_weights(model, files)
    fill_weights(model, "", ModelFiles(files, "gpt_oss"), torch.device("cpu"))
    expected = dict(read.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    model.config.save_pretrained(tmp_path / "export")
    assert "quantization_config" not in (tmp_path / "export" / "config.json").read_text()
    change_weights(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.uint8)})
    with pytest.raises(ModelError, match=r"norm\.weight is U8"):  # other blocks stay refused
        require_usable_model(folder)
