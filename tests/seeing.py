"""Tiny folders of models that see, with random weights large enough that images matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
KINDS: tuple[Kind, ...] = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
)


def by_day(*kinds: Kind) -> list[object]:
    """Return all kinds as parameters, of which these alone are tested by day."""
    return [k if k in kinds else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]


SERVED_KINDS = by_day("qwen3_vl")
"""A server starts for each."""

_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 3, 4, 5, 6
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_OF_ALL_TOWERS = ("depth", "num_heads", "spatial_merge_size", "temporal_patch_size")
_TOKENS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_OF_QWEN2 = {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_OF_QWEN3 = {
    "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "head_dim": 16,
}
_TOWER_OF_QWEN3 = {
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,  # no matrix is square
    "norm_topk_prob": True,
}
_RECURRENT = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,  # as published: SGLang reads it elsewhere
    },
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_PARTS: dict[Kind, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        _OF_QWEN2,  # the last is in published folders, and SGLang reads no other
        {"patch_size": 14, "embed_dim": 64, "mlp_ratio": 2, "in_chans": 3},
    ),
    "qwen2_5_vl": (_OF_QWEN2, {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (_OF_QWEN3, _TOWER_OF_QWEN3),
    "qwen3_5": (_RECURRENT, _TOWER_OF_QWEN3 | {"deepstack_visual_indexes": []}),
    "qwen3_5_moe": (
        _RECURRENT | _EXPERTS | {"shared_expert_intermediate_size": 32},
        _TOWER_OF_QWEN3 | {"deepstack_visual_indexes": []},
    ),
    "qwen3_vl_moe": (
        _OF_QWEN3 | _EXPERTS | {"num_hidden_layers": 4},
        _TOWER_OF_QWEN3 | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},  # SGLang takes three
    ),
}
"""Settings of the language model and of the tower."""


def make_seeing_folder(
    folder: Path, kind: Kind = "qwen2_5_vl", *, is_tied: bool = False, seed: int = 0
) -> Path:
    """Write a folder as transformers writes one: weights, tokenizer, chat template, processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(kind, is_tied=is_tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder)
    if kind.startswith("qwen3_5"):  # published, needed by SGLang, and dropped by transformers
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["full_attention_interval"] = 4
        (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(folder)
    kinds = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
    name = f"{kinds.get(kind, 'Qwen3VL')}Processor"
    films = f"{'Qwen2VL' if kind in kinds else 'Qwen3VL'}VideoProcessor"
    images = {
        "patch_size": _PARTS[kind][1]["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    processor = {
        "processor_class": name,
        "image_processor": images | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": images | {"video_processor_type": films},
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    released = images | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(released))
    return folder


def _transpose_experts(folder: Path) -> None:
    """Turn experts as published folders of Qwen3-VL have them, which transformers 5 does not."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _build(kind: Kind, *, is_tied: bool) -> PreTrainedModel:
    text, vision = _PARTS[kind]
    tower = {n: size for n, size in _VISION.items() if kind != "qwen2_vl" or n in _OF_ALL_TOWERS}
    config = AutoConfig.for_model(
        kind,
        text_config=_TEXT | text,
        vision_config=tower | {"hidden_size": 64} | vision,
        tie_word_embeddings=is_tied,
        **_TOKENS,
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return model


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes, some words, and the special tokens of Qwen's models."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(
        ["what is in this picture ? a red square , a blue circle ."] * 20, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL[3:]),
        chat_template=CHAT_TEMPLATE,
    )
