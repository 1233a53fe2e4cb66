from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.planning.split import count_adapter
from hybridrl.workers.train.megatron.architecture import (
    hf_tensors,
    inverse_frequencies,
    megatron_architecture,
)
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.lora_engines import LORA

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}


def _change(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_some_layers_of_a_mixture_may_be_dense(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", num_layers=4)
    _change(folder, mlp_only_layers=[3], decoder_sparse_step=2)
    architecture = megatron_architecture(folder)
    assert [architecture.is_sparse(layer) for layer in range(4)] == [False, True, False, False]
    with_experts = {name.split(".")[2] for name in hf_tensors(folder) if ".experts." in name}
    assert with_experts == {"1"}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_adapters_are_planned_as_large_as_they_are(tmp_path: Path, family: Family) -> None:
    folder = make_tiny_model(tmp_path, family)
    shapes = adapter_shapes(hf_tensors(folder), LORA).values()
    planned = count_adapter(megatron_architecture(folder), LORA)
    assert planned == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rotary_frequencies_equal_those_of_transformers(
    tmp_path: Path, scaling: dict[str, object] | None
) -> None:
    folder = make_tiny_model(tmp_path, "llama", hidden_size=256)
    if scaling:
        _change(folder, rope_parameters=scaling)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    ours = inverse_frequencies(megatron_architecture(folder))
    assert torch.equal(ours, model.model.rotary_emb.inv_freq)
    if scaling:
        plain = inverse_frequencies(megatron_architecture(make_tiny_model(tmp_path / "p", "llama")))
        assert not torch.equal(ours[:4], plain)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ("qwen3", "attention_dropout", 0.1),
        ("qwen3_moe", "use_sliding_window", True),
        ("mistral", "sliding_window", 127),
        ("mixtral", "sliding_window", 8),
    ],
)
def test_unsupported_options_are_rejected_by_name(
    tmp_path: Path, family: Family, key: str, value: object
) -> None:
    folder = _change(make_tiny_model(tmp_path, family), **{key: value})
    if key == "use_sliding_window":
        _change(folder, sliding_window=8)
    name = "attention_bias" if key == "mlp_bias" else key
    with pytest.raises(ModelError, match=rf"{name}=.*actor=fsdp2"):
        megatron_architecture(folder)


def test_windows_that_hide_no_token_are_no_windows(tmp_path: Path) -> None:
    mistral = make_tiny_model(tmp_path / "mistral", "mistral", max_position_embeddings=128)
    for window in (None, 128):
        assert megatron_architecture(_change(mistral, sliding_window=window)).num_layers == 2
    without = {"model_type": "mistral"}  # transformers then has a window of 4096
    (mistral / "config.json").write_text(json.dumps(without))
    with pytest.raises(ModelError, match=r"sliding_window=4096 .*actor=fsdp2"):
        megatron_architecture(mistral)
    folder = make_tiny_model(tmp_path, "qwen2", num_layers=2)
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    assert megatron_architecture(_change(folder, max_window_layers=2, **windows)).num_layers == 2
    with pytest.raises(ModelError, match="use_sliding_window"):
        megatron_architecture(_change(folder, max_window_layers=1, **windows))


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    folder = _change(make_tiny_model(tmp_path, "llama"), model_type="olmo2")
    with pytest.raises(ModelError, match=r"'olmo2'.*llama, mistral.*, qwen3_moe.*bridge"):
        megatron_architecture(folder)


def test_router_without_gradient_is_rejected(tmp_path: Path) -> None:
    one: dict[str, Any] = {"num_experts_per_tok": 1}
    folder = make_tiny_model(tmp_path / "mute", "qwen3_moe", **one)
    with pytest.raises(ModelError, match=r"norm_topk_prob=true divides.*always 1.*=false"):
        megatron_architecture(folder)
    folder = make_tiny_model(tmp_path / "learns", "qwen3_moe", **one, norm_topk_prob=False)
    experts = megatron_architecture(folder).experts
    assert experts is not None
    assert experts.num_per_token == 1
