"""Writing a Hugging Face folder from weights that arrive one at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.atomic_io import rename_into_place
from hybridrl.checkpoint.fingerprint import TOKENIZER_FILES
from hybridrl.errors import RunFolderError
from hybridrl.json_text import to_json_text
from hybridrl.workers.train.protocol import WeightSpec


class Configuration(Protocol):
    """Of a model, or of how it generates."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write itself into a folder."""
        ...


def configs_of(model: PreTrainedModel) -> list[Configuration]:
    """Return the configurations that a model's folder holds."""
    if not model.can_generate() or model.generation_config is None:
        return [model.config]
    return [model.config, model.generation_config]


def write_hf_folder(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    specs: Sequence[WeightSpec],
    configs: Sequence[Configuration],
    source: Path,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Write weights, configuration and tokenizer; the folder appears whole or not at all.

    No more than one safetensors file of weights is held at a time.

    Args:
        folder: must not exist; its parents are made.
        weights: names and full tensors, in the order of ``specs``.
        specs: all weights to come.
        configs: of the model, and of generation if it has one.
        source: the folder whose tokenizer files, if any, are copied.
        max_file_bytes: weights per file; a single larger tensor has a file of its own.

    Raises:
        RunFolderError: the folder exists, or cannot be written.
    """
    with atomic_folder(folder) as unfinished:
        _write_weights(unfinished, weights, _spans(specs, max_file_bytes))
        for config in configs:
            config.save_pretrained(unfinished)
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, unfinished / path.name)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Lend a folder to write in; it appears under its name, on disk, when all is written.

    Raises:
        RunFolderError: the folder exists, or cannot be written.
    """
    if folder.exists():
        raise RunFolderError(f"{folder} exists; export to a new folder, or remove this one")
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        rename_into_place(unfinished, folder)
    except (OSError, SafetensorError) as err:
        raise RunFolderError(f"{folder} cannot be written: {err}; free or choose a disk") from err
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], spans: list[list[WeightSpec]]
) -> None:
    stream = iter(weights)
    weight_map = {}
    for number, stretch in enumerate(spans, 1):
        name = f"model-{number:05}-of-{len(spans):05}.safetensors"
        if len(spans) == 1:
            name = "model.safetensors"
        tensors = {key: tensor.contiguous().cpu() for key, tensor in islice(stream, len(stretch))}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    if len(spans) > 1:
        total_bytes = sum(spec.num_bytes for stretch in spans for spec in stretch)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(to_json_text(index), encoding="utf-8")


def _spans(specs: Sequence[WeightSpec], max_file_bytes: int) -> list[list[WeightSpec]]:
    """Cut the weights, in their order, into stretches that fit a file."""
    spans: list[list[WeightSpec]] = []
    num_bytes = 0
    for spec in specs:
        if not spans or num_bytes + spec.num_bytes > max_file_bytes:
            spans.append([])
            num_bytes = 0
        spans[-1].append(spec)
        num_bytes += spec.num_bytes
    return spans
