from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hybridrl.config.model import LoraConfig
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.memory import adapter_shapes, base_shapes, held_bytes
from tests.config.values import config_of
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_those_of_the_model_with_tied_ones_once(tmp_path: Path, is_tied: bool) -> None:
    folder = make_tiny_model(tmp_path, tie_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert base_shapes(folder) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_an_adapter_adds_two_matrices_a_layer_named_as_in_its_file(tmp_path: Path) -> None:
    overrides = ("lora=default", "lora.rank=2", "lora.target_modules=[q_proj]")
    lora: LoraConfig = config_of(*overrides).lora
    folder = make_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapter = adapter_shapes(base_shapes(folder), lora)
    assert len(adapter) == 2 * model.config.num_hidden_layers
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    outputs, inputs = model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape
    assert adapter[f"{layer}.lora_A.weight"] == (2, inputs)
    assert adapter[f"{layer}.lora_B.weight"] == (outputs, 2)


def test_a_server_is_never_believed_to_hold_more_than_it_says() -> None:
    usage = {"weight": 10.0, "kvcache": 0.0005, "graph": {"decode": 0.2, "prefill": 0.3}}
    info = {"internal_states": [{"memory_usage": usage}]}
    assert 9 * 2**30 < held_bytes(info, MemoryTag.WEIGHTS) < 10 * 2**30
    assert held_bytes(info, MemoryTag.KV_CACHE) == 0
    assert 0.4 * 2**30 < held_bytes(info, MemoryTag.CUDA_GRAPH) < 0.5 * 2**30
