from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from hybridrl.errors import ModelError
from hybridrl.models.architecture import architecture_of, read_architecture
from hybridrl.models.families import FAMILIES
from hybridrl.planning.split import count_parameters
from hybridrl.run.starter import write_random_model
from tests.config.values import config_of
from tests.planning.models import QWEN2_5_VL_3B
from tests.seeing import KINDS, Kind, make_seeing_folder

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}

EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16},
    "num_hidden_layers": 5,
}


MODEL_TYPES = ("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def num_real_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        if "_vl_" not in config.model_type:
            return AutoModelForCausalLM.from_config(config).num_parameters()
        body = AutoModel.from_config(config)  # such a language model has no class with a head
        is_tied = getattr(config, "tie_word_embeddings", False)
        return body.num_parameters() + (not is_tied) * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, head_dim=24),
        LlamaConfig(**{**SIZES, "num_key_value_heads": None}),
        Qwen2Config(**SIZES),
        Qwen2Config(**SIZES, attention_bias=True),
        Qwen3Config(**SIZES, head_dim=32),
        Qwen3Config(**SIZES, attention_bias=True),
        MistralConfig(**SIZES),
        Gemma3TextConfig(**SIZES, head_dim=24),
        Phi3Config(**SIZES, pad_token_id=None),
        SmolLM3Config(**SIZES, attention_bias=True, mlp_bias=True, pad_token_id=None),
        Olmo2Config(**SIZES),
        Olmo2Config(**SIZES, attention_bias=True),
        Qwen3MoeConfig(**{**SIZES, **EXPERTS}),
        Qwen3MoeConfig(**{**SIZES, **EXPERTS}, mlp_only_layers=[0, 3]),
        Qwen3MoeConfig(**{**SIZES, **EXPERTS}, decoder_sparse_step=2),
        Qwen3MoeConfig(**{**SIZES, **EXPERTS}, mlp_only_layers=[0, 1, 2, 3, 4]),
        MixtralConfig(**SIZES, num_local_experts=4),
        Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=56, mlp_only_layers=[1]),
        Qwen2MoeConfig(**SIZES, qkv_bias=False),
    ],
    ids=[
        *("llama", "llama-bias", "llama-heads", "llama-mha", "qwen2", "qwen2-bias", "qwen3"),
        *("qwen3-bias", "mistral", "gemma3", "phi3", "smollm3-bias", "olmo2", "olmo2-bias"),
        *("moe", "moe-some-dense", "moe-every-second", "moe-none"),
        *("mixtral", "qwen2-moe", "qwen2-moe-no-bias"),
    ],
)
def test_parameters_are_counted_as_transformers_counts_them(
    config: PretrainedConfig, is_tied: bool, tmp_path: Path
) -> None:
    config.tie_word_embeddings = is_tied
    config.save_pretrained(tmp_path)
    assert count_parameters(read_architecture(tmp_path)) == num_real_parameters(config)


@pytest.mark.parametrize(
    "model_type",  # transformers builds no HunYuan without a head_dim
    [name for name in FAMILIES if name != "hunyuan_v1_dense"],
)
def test_a_family_without_sizes_has_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert count_parameters(architecture) == num_real_parameters(config)
    assert architecture.max_positions == config.max_position_embeddings
    assert architecture.is_tied == getattr(config, "tie_word_embeddings", False)
    assert architecture.norm_eps == getattr(config, "rms_norm_eps", architecture.norm_eps)
    if model_type in MODEL_TYPES:
        assert architecture.rope_theta == config.rope_parameters["rope_theta"]
    if architecture.experts is not None:
        routed = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
        names = dict.fromkeys(routed, ("n_routed_experts", "num_experts_per_tok"))
        names["minimax_m2"] = ("num_local_experts", "num_experts_per_tok")
        names["ernie4_5_moe"] = ("moe_num_experts", "moe_k")
        read = (architecture.experts.num_experts, architecture.experts.num_per_token)
        usual = ("num_experts", "num_experts_per_tok")
        assert read == tuple(getattr(config, name) for name in names.get(model_type, usual))


@pytest.mark.parametrize(
    ("kind", "is_tied"), [*((kind, False) for kind in KINDS), ("qwen2_5_vl", True)]
)
def test_towers_are_counted_as_transformers_counts_them(
    kind: Kind, is_tied: bool, tmp_path: Path
) -> None:
    folder = make_seeing_folder(tmp_path / "model", kind, is_tied=is_tied)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    assert count_parameters(read_architecture(folder)) == whole.num_parameters()


def test_published_models_have_their_published_sizes(tmp_path: Path) -> None:
    qwen = Qwen2Config(
        **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
        tie_word_embeddings=True,
    )
    qwen.save_pretrained(tmp_path)
    assert count_parameters(read_architecture(tmp_path)) == 494_032_768  # Qwen2.5-0.5B's model card
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    assert count_parameters(read_architecture(tmp_path)) == 3_754_622_976  # Qwen2.5-VL-3B's


def test_layers_with_experts_are_those_of_transformers(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **{**SIZES, **EXPERTS, "num_hidden_layers": 6}, mlp_only_layers=[3], decoder_sparse_step=2
    )
    config.save_pretrained(tmp_path)  # transformers 5 writes num_local_experts
    experts = read_architecture(tmp_path).experts
    assert experts is not None
    assert (experts.num_experts, experts.num_per_token, experts.intermediate_size) == (4, 2, 40)
    assert experts.sparse_layers == (1, 5)


@pytest.mark.parametrize("name", ["starter", "starter_that_sees"])
def test_a_made_model_is_counted_before_it_is_made(name: str, tmp_path: Path) -> None:
    model = config_of(f"model={name}").model
    assert model.starter is not None
    write_random_model(model.starter, tmp_path / "made", seed=0)
    assert architecture_of(model) == read_architecture(tmp_path / "made")
    assert architecture_of(replace(model, path=str(tmp_path / "made"))) == architecture_of(model)


OLD_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "values",
    [
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}},
        {**OLD_LLAMA3, "max_position_embeddings": 131072},
    ],
    ids=["old-rope", "new-rope", "llama3"],
)
def test_reader_agrees_with_transformers(
    model_type: str, values: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    architecture, rope = read_architecture(tmp_path), config.rope_parameters
    assert architecture.max_positions == config.max_position_embeddings
    assert architecture.norm_eps == config.rms_norm_eps
    assert architecture.rope_theta == rope["rope_theta"]
    scaling = architecture.rope_scaling
    assert (scaling is not None) == (rope["rope_type"] == "llama3")
    if scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor")
        read = (scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor)
        assert read == tuple(rope[name] for name in names)
        assert scaling.original_max_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "cannot be read"),
        ("[]", "holds a JSON list, must be an object"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("{}", "holds no model_type"),
        ('{"model_type": "mamba"}', "'mamba'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "not an integer"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "not an integer above 0"),
        ('{"model_type": "qwen3_moe", "decoder_sparse_step": 0}', "not an integer above 0"),
    ],
)
def test_an_odd_config_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        read_architecture(tmp_path)
