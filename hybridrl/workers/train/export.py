"""Write a Hugging Face folder, or a peft folder, from weights that arrive one at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from hybridrl.atomic_io import rename_into_place
from hybridrl.checkpoint.fingerprint import TOKENIZER_FILES
from hybridrl.errors import RunFolderError
from hybridrl.json_text import to_json_text
from hybridrl.models.adapter_names import WEIGHTS_FILE
from hybridrl.models.load import WeightFiles
from hybridrl.models.model_folder import CONFIG, has_other_parts, read_settings
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.protocol import NamedTensors, WeightSpec

_WRITTEN_ANEW = {
    *("torch_dtype", "rope_theta", "rope_scaling", "num_labels", "auto_map"),
    "quantization_config",
}
"""Settings that transformers 5 writes under other names, that name files beside config.json,
or that a folder of float weights has not."""

_HEAD = "score.weight"

if TYPE_CHECKING:  # peft takes 2 s, which a run without adapters need not wait for
    from hybridrl.models.adapter import Adapter


Configuration: TypeAlias = PretrainedConfig | GenerationConfig


def configs_of(model: PreTrainedModel) -> list[Configuration]:
    """Return the configurations of a model's folder."""
    if not model.can_generate() or model.generation_config is None:
        return [model.config]
    return [model.config, model.generation_config]


def write_on_first(
    ranks: Ranks, weights: NamedTensors, write: Callable[[NamedTensors], None]
) -> None:
    """Let the first rank write weights that all gather; if it fails, all raise."""
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            write(weights)
        except Exception as err:  # raised below, when no rank waits for this one
            failure = err
    for _ in weights:  # on the other ranks, and on the first one after a failure
        pass
    message = ranks.share_text("" if failure is None else str(failure) or repr(failure))
    if failure is not None:
        raise failure
    if message:
        raise RunFolderError(message)


def write_hf_folder(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    specs: Sequence[WeightSpec],
    configs: Sequence[Configuration],
    source: Path,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Write weights, configuration and tokenizer; see ``atomic_folder``.

    ``specs`` lists all weights in their order; one file of at most ``max_file_bytes``, or of one
    tensor, is held at a time. Tokenizer files come from ``source``. If its language model is part
    of a model that also sees, the written one is, too, with all other weights unchanged; a model
    with a score in place of words is written alone.
    """
    is_critic = any(spec.name == _HEAD for spec in specs)
    is_part = has_other_parts(source) and not is_critic
    if is_part:
        # Name the language model's weights as in the model around it, and add that one's others.
        files = WeightFiles(source)
        others = {name: files.read_other_part(name) for name in files.other_parts}  # mapped only
        own = ((files.stored_name(name), tensor) for name, tensor in weights)
        weights = chain(own, others.items())
        specs = [replace(spec, name=files.stored_name(spec.name)) for spec in specs]
        specs += [WeightSpec(n, tuple(t.shape), t.nbytes) for n, t in others.items()]
    with atomic_folder(folder) as unfinished:
        _write_weights(unfinished, weights, divide_by_bytes(specs, max_file_bytes))
        for config in configs:
            config.save_pretrained(unfinished)
        if is_part:  # training changes no setting, and this one describes the other parts, too
            shutil.copyfile(source / CONFIG, unfinished / CONFIG)
        elif (source / CONFIG).is_file():  # not of a made model
            _keep_settings(source, unfinished / CONFIG)
        patterns = (*TOKENIZER_FILES, "*processor_config.json") if is_part else TOKENIZER_FILES
        for pattern in patterns:
            for path in source.glob(pattern):
                shutil.copyfile(path, unfinished / path.name)


def _keep_settings(source: Path, target: Path) -> None:
    """Add the settings of the source that transformers does not write: SGLang reads some of them.

    DeepSeek's ``topk_method`` is one, MiniMax's ``use_qk_norm`` another.
    """
    written = json.loads(target.read_text(encoding="utf-8"))
    given = read_settings(source)
    missing = {name: given[name] for name in given.keys() - written.keys() - _WRITTEN_ANEW}
    text = to_json_text({**written, **dict(sorted(missing.items()))}, indent=2)
    target.write_text(f"{text}\n", encoding="utf-8")


def write_adapter_folder(
    folder: Path, weights: NamedTensors, *, adapter: Adapter, base_model: Path, ranks: Ranks
) -> None:
    """Write full A and B by their names in the file, with settings; see ``atomic_folder``."""

    def write(weights: NamedTensors) -> None:
        with atomic_folder(folder) as unfinished:
            tensors = {adapter.name_in_file(n): t.contiguous().cpu() for n, t in weights}
            save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
            adapter.save_settings(unfinished, base_model=base_model)

    write_on_first(ranks, weights, write)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Lend a folder that gets its name when it is complete; RunFolderError if it exists."""
    if folder.exists():
        raise RunFolderError(f"{folder} exists; export to a new folder, or remove this one")
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        rename_into_place(unfinished, folder)
    except (OSError, SafetensorError) as err:
        raise RunFolderError(
            f"{folder} cannot be written: {err}; free its disk or choose another"
        ) from err
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], files: list[list[WeightSpec]]
) -> None:
    stream = iter(weights)
    weight_map = {}
    for number, specs in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            name = "model.safetensors"
        tensors = {key: tensor.contiguous().cpu() for key, tensor in islice(stream, len(specs))}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        total_bytes = sum(spec.num_bytes for specs in files for spec in specs)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(to_json_text(index), encoding="utf-8")


def divide_by_bytes(specs: Iterable[WeightSpec], max_bytes: int) -> list[list[WeightSpec]]:
    """Divide the weights, in their order, into parts of limited size; a larger one is alone."""
    parts: list[list[WeightSpec]] = []
    num_bytes = 0
    for spec in specs:
        if not parts or num_bytes + spec.num_bytes > max_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(spec)
        num_bytes += spec.num_bytes
    return parts
