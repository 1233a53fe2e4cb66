"""Real sizes in one table, and random weights of those sizes made on the spot.

A tensor is drawn where it is fastest (on the GPU) and written once; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging as transformers_logging

from hybridrl.data.starter_tokenizer import build_starter_tokenizer

_FILE_BYTES = 4 * 2**30
_STD = 0.02
_CONFIGS: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one published model."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_size: int

    num_parameters: int
    """What transformers counts; a test compares."""

    is_tied: bool = False


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 24, 14, 2, 4864, 151936, 64, 494_032_768, is_tied=True),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 28, 12, 2, 8960, 151936, 128, 1_543_714_304, is_tied=True),
    "qwen2.5-3b": Shape("qwen2", 2048, 36, 16, 2, 11008, 151936, 128, 3_085_938_688, is_tied=True),
    "qwen2.5-7b": Shape("qwen2", 3584, 28, 28, 4, 18944, 152064, 128, 7_615_616_512),
    "qwen3-8b": Shape("qwen3", 4096, 36, 32, 8, 12288, 151936, 128, 8_190_735_360),
    "small": Shape("qwen3", 512, 4, 8, 4, 1024, 2048, 64, 11_539_456),
    "tiny": Shape("qwen3", 64, 2, 4, 2, 128, 512, 16, 139_648),
}
"""By name. ``tiny`` stands for each of the others in a dry run, ``small`` serves tests on a GPU."""


def ensure_model(name: str, folder: Path, *, device: torch.device) -> Path:
    """Return a Hugging Face folder with random bfloat16 weights; make it if need be."""
    target = folder / name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    try:
        _write(SHAPES[name], unfinished, device=device)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def config_of(shape: Shape) -> PretrainedConfig:
    """Return what stands in config.json. No token ends a text: every response has full length."""
    sizes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }
    if shape.family == "qwen3":
        sizes["head_dim"] = shape.head_size
    return _CONFIGS[shape.family](**sizes)


def _write(shape: Shape, folder: Path, *, device: torch.device) -> None:
    transformers_logging.disable_progress_bar()
    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    build_starter_tokenizer().save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    named = ((name, p.shape) for name, p in model.named_parameters())
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_files(_draw(named, generator)), 1):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    os.sync()


def _draw(
    named: Iterator[tuple[str, torch.Size]], generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights on the host: norms of 1, all else normal, biases too."""
    for name, size in named:
        if name.endswith("norm.weight"):
            yield name, torch.ones(size, dtype=torch.bfloat16)
            continue
        values = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
        yield name, values.normal_(std=_STD, generator=generator).cpu()


def _files(named: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Gather tensors into files of some 4 GiB."""
    tensors: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in named:
        if tensors and filled + tensor.nbytes > _FILE_BYTES:
            yield tensors
            tensors, filled = {}, 0
        tensors[name] = tensor
        filled += tensor.nbytes
    yield tensors
