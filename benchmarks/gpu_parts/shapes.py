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
from hybridrl.models.architecture import Architecture, read_architecture

_FILE_BYTES = 4 * 2**30
_STD = 0.02
_CONFIGS: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of one published model."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    head_size: int

    num_parameters: int
    """What transformers counts; a test compares."""


SHAPES = {
    "qwen2.5-0.5b": Shape(
        family="qwen2",
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        is_tied=True,
        head_size=64,
        num_parameters=494_032_768,
    ),
    "qwen2.5-1.5b": Shape(
        family="qwen2",
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        is_tied=True,
        head_size=128,
        num_parameters=1_543_714_304,
    ),
    "qwen2.5-3b": Shape(
        family="qwen2",
        hidden_size=2048,
        num_layers=36,
        num_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        vocab_size=151936,
        is_tied=True,
        head_size=128,
        num_parameters=3_085_938_688,
    ),
    "qwen2.5-7b": Shape(
        family="qwen2",
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        is_tied=False,
        head_size=128,
        num_parameters=7_615_616_512,
    ),
    "qwen3-8b": Shape(
        family="qwen3",
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        vocab_size=151936,
        is_tied=False,
        head_size=128,
        num_parameters=8_190_735_360,
    ),
    "small": Shape(
        family="qwen3",
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        num_key_value_heads=4,
        intermediate_size=1024,
        vocab_size=2048,
        is_tied=False,
        head_size=64,
        num_parameters=11_539_456,
    ),
    "tiny": Shape(
        family="qwen3",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
        is_tied=False,
        head_size=16,
        num_parameters=139_648,
    ),
}
"""By name. ``tiny`` stands for each of the others in a dry run, ``small`` serves tests on a GPU."""


def ensure_model(name: str, folder: Path, *, device: torch.device) -> Path:
    """Return a Hugging Face folder with random bfloat16 weights of that shape; make it if need be.

    Args:
        name: key of ``SHAPES``.
        folder: where made models are kept.
        device: draws the numbers.
    """
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


def shape_in(folder: Path) -> Architecture:
    """Return the sizes as planning reads them from a made folder."""
    return read_architecture(folder)


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
