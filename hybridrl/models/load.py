"""Hugging Face model folders: supported architectures, and weights read module by module.

A model is built without memory and then filled module by module. So a model that is sharded
meanwhile is never complete in the memory of one process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hybridrl.errors import ModelError, first_of
from hybridrl.models.architecture import read_architecture
from hybridrl.models.experts import StoredNames
from hybridrl.models.model_folder import (
    CONFIG,
    INDEX,
    SEEING,
    WEIGHTS,
    has_other_parts,
    is_mxfp4,
    own_name,
    read_settings,
    read_weight_map,
    text_folder,
    vision_settings,
)
from hybridrl.models.packed_model import PACKED_ATTENTION
from hybridrl.models.seeing import build_seeing_model

_FLOATS = ("F32", "BF16", "F16", "F64")
_NUM_NAMED = 20
_MXFP4 = ("_blocks", "_scales")
_BLOCK_NUMBERS, _BLOCK_BYTES = 32, 16


class WeightSource(Protocol):
    """A source of the values of a model's parameters."""

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        """Return one tensor in host memory as it is stored, by its parameter's name."""
        ...


def require_finite(values: Tensor, *, name: str, file: Path, fix: str) -> None:
    """Reject NaN and infinity in a file: later they would look like a bad learning rate."""
    # One pass at the speed of memory; isfinite() would take 40 times as long in bfloat16.
    if values.numel() and not all(bool(end.isfinite()) for end in values.aminmax()):
        raise ModelError(
            f"{file}: {name} contains NaN or infinity; the file is corrupt, or a run saved it that "
            f"diverged: {fix}"
        )


class WeightFiles:
    """The safetensors of a model folder, read one tensor at a time through a memory map.

    ModelError if neither ``model.safetensors`` nor an index exists, or a file is corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file_of = read_weight_map(folder) if (folder / INDEX).is_file() else {}
        for file_name in sorted({*file_of.values()} or {WEIGHTS}):
            if not (folder / file_name).is_file():
                raise ModelError(
                    f"{folder} has no {file_name}; download the folder again, or load it with "
                    "transformers and write it with save_pretrained(), which writes safetensors"
                )
        file_of = file_of or dict.fromkeys(_open_safetensors(folder / WEIGHTS).keys(), WEIGHTS)
        self._stored = {name: name for name in file_of}
        self.other_parts: dict[str, str] = {}
        """Names of tensors that are not used, as stored, and their files."""
        if has_other_parts(folder):
            sees = vision_settings(folder) is not None
            texts = {stored: own_name(stored, sees=sees) for stored in file_of}
            self._stored = {text: stored for stored, text in texts.items() if text is not None}
            self.other_parts = {n: file_of[n] for n, text in texts.items() if text is None}
        self._file_of = {name: file_of[stored] for name, stored in self._stored.items()}
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors of the language model."""
        return frozenset(self._file_of)

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor of the language model has in the files, or would have."""
        begin = "model."
        if name in self._stored or not name.startswith(begin):
            return self._stored.get(name, name)
        known, stored = next(each for each in self._stored.items() if each[0].startswith(begin))
        return stored.removesuffix(known.removeprefix(begin)) + name.removeprefix(begin)

    def read_other_part(self, stored: str) -> Tensor:
        """Read one tensor outside the language model."""
        tensor: Tensor = self._open_file(self.other_parts[stored]).get_tensor(stored)
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Read the shape of a tensor, without its values."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        """Read one tensor to host memory, in its stored type.

        ModelError if the stored shape differs, or a value is NaN or infinite.
        """
        if (stored := self.shape_of(name)) != shape:
            raise ModelError(
                f"{self._folder / self._file_of[name]}: {name} is {list(stored)}, and by "
                f"config.json it must be {list(shape)}; point model.path at a folder whose files "
                "belong together"
            )
        tensor: Tensor = self._open_file(self._file_of[name]).get_tensor(self._stored[name])
        self._require_finite(name, tensor)
        return tensor

    def read_range(self, name: str, values: Sequence[tuple[int, int]]) -> Tensor:
        """Read a range of one tensor, from begin to end along each dimension; see ``read``."""
        edges = tuple(slice(begin, end) for begin, end in values)
        tensor: Tensor = self._slice(name)[edges]
        self._require_finite(name, tensor)
        return tensor

    def require_floats(self, but: Collection[str] = ()) -> None:
        """Reject quantised weights, whose scales would be ignored, but for those named."""
        for name in sorted(self.names.difference(but)):
            if (dtype := self._slice(name).get_dtype()) not in _FLOATS:
                raise ModelError(
                    f"{self._folder / self._file_of[name]}: {name} is {dtype}, and only "
                    f"{', '.join(_FLOATS)} are supported: the scales of quantised weights would be "
                    "ignored; point model.path at a folder with float weights"
                )

    def require(
        self, wanted: Mapping[str, Sequence[int]], *, known: Collection[str], model: str
    ) -> None:
        """Compare all tensors with the names and full shapes that a model wants.

        Args:
            known: further names, such as copies of tied weights, that do no harm.

        Raises:
            ModelError: tensors are missing, unexpected or of another shape; or one is quantised.
        """
        self.require_floats(but={name for name in wanted if name.endswith(_MXFP4)})
        misshapen = [
            f"{name} is {list(stored)}, and by config.json it must be {list(shape)}"
            for name, shape in wanted.items()
            if name in self.names and (stored := self.shape_of(name)) != tuple(shape)
        ]
        # Old llama folders have rotary frequencies.
        surplus = {n for n in self.names - wanted.keys() if not n.endswith("rotary_emb.inv_freq")}
        problems = [
            f"{len(names)} {problem}: {first_of(names, at_most=_NUM_NAMED)}"
            for problem, names in (
                ("missing", [name for name in wanted if name not in self.names]),
                ("not of this model", sorted(surplus.difference(known))),
                ("of another shape", misshapen),
            )
            if names
        ]
        if problems:
            raise ModelError(
                f"{self._folder}: the safetensors are not those of a {model}: "
                f"{'; '.join(problems)}; point model.path at a folder whose files belong together, "
                "as save_pretrained() writes it"
            )

    def _require_finite(self, name: str, values: Tensor) -> None:
        file = self._folder / self._file_of[name]
        require_finite(values, name=name, file=file, fix="point model.path at another")

    def _slice(self, name: str) -> Any:  # noqa: ANN401 - safetensors ships no types
        return self._open_file(self._file_of[name]).get_slice(self._stored[name])

    def _open_file(self, file_name: str) -> Any:  # noqa: ANN401 - safetensors ships no types
        if file_name not in self._open:
            self._open[file_name] = _open_safetensors(self._folder / file_name)
        return self._open[file_name]


class ModelFiles:
    """The weights of a folder by the names of transformers' parameters.

    Folders have the matrices of experts apart, or, if somebody saved them so, fused; those of
    gpt-oss also as MXFP4, blocks of 32 numbers with a scale each, which are read as bfloat16.
    """

    def __init__(self, files: WeightFiles, model_type: str) -> None:
        self._files = files
        self._names = StoredNames(model_type)

    def shapes_of(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        """Return the tensors in the files that hold a parameter, or must hold it."""
        if name in self._files.names:
            # Transformers 5 writes no transposed experts, and reads both as it does here.
            is_own = self._files.shape_of(name) == tuple(shape)
            return {name: shape if is_own else self._names.turned_shape(name, shape)}
        blocks, scales = (f"{name}{end}" for end in _MXFP4)
        if blocks in self._files.names:
            num_experts, num_inputs, num_outputs = shape
            packed = torch.Size((num_experts, num_outputs, num_inputs // _BLOCK_NUMBERS))
            return {blocks: torch.Size((*packed, _BLOCK_BYTES)), scales: packed}
        return dict(self._names.shapes(name, shape))

    def read(self, name: str, *, shape: torch.Size) -> Tensor:
        """Read one parameter to host memory; see ``WeightFiles.read``."""
        matrices = () if name in self._files.names else self._names.matrices(name, shape)
        if not matrices:
            stored = [self._files.read(n, shape=s) for n, s in self.shapes_of(name, shape).items()]
            if len(stored) == 1:
                turned = self._names.turned(name, stored[0])
                return stored[0] if stored[0].shape == shape else turned.contiguous()
            numbers: Tensor = convert_moe_packed_tensors(*stored)
            return numbers
        values = [self._files.read(matrix.name, shape=matrix.shape) for matrix in matrices]
        # The type that holds them all, should they differ. They are views of mapped files.
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in values})
        fused = torch.empty(shape, dtype=dtype)
        for matrix, tensor in zip(matrices, values, strict=True):
            matrix.of(fused).copy_(tensor)
        return fused


def shapes_as_read(files: WeightFiles) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all weights of a folder, of MXFP4 those of the numbers."""
    blocks, scales = _MXFP4
    shapes = {}
    for name in files.names:
        if name.endswith(scales):
            continue
        shape = files.shape_of(name)
        if name.endswith(blocks):
            num_experts, num_outputs, num_blocks, _ = shape
            shape = (num_experts, num_blocks * _BLOCK_NUMBERS, num_outputs)
        shapes[name.removesuffix(blocks)] = shape
    return shapes


def read_model_type(folder: Path) -> str:
    """Read the ``model_type`` of a Hugging Face folder."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; set model.path to a Hugging Face model folder")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no config.json; set model.path to a Hugging Face folder")
    return str(read_settings(folder)["model_type"])


def load_model_config(folder: Path, **changes: object) -> PretrainedConfig:
    """Let transformers read the language model's settings; ``ModelError`` if it cannot."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            text_folder(folder), local_files_only=True, **changes
        )
        config.__dict__.pop("quantization_config", None)  # MXFP4 is read as bfloat16
    except Exception as err:  # transformers raises anything, depending on the file
        raise ModelError(
            f"transformers cannot read {folder / CONFIG} ({type(err).__name__}: {err}); correct "
            "it, or download the folder again"
        ) from err
    return config


def build_empty_model(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the folder's causal language model without memory (on the ``meta`` device).

    Its attention takes packed rows; see ``hybridrl.models.packed_model``.

    Raises:
        ModelError: the folder does not exist, or its ``config.json`` is not that of a family whose
            packed forward pass equals that of single rows, which tests prove.
    """
    return _build_empty(folder, AutoModelForCausalLM, dtype=dtype)


def build_empty_critic(
    folder: Path, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the folder's model without memory, with a value head of zeros as its last layer.

    With zeros all values begin at 0, and the first advantages are the rewards. A random head would
    begin with noise of the size of the hidden states.
    """
    critic = build_with_head(folder, is_of_tokens=True, dtype=dtype)
    _begin_head_at_zero(critic, device)
    return critic


def build_empty_reward_model(
    folder: Path, *, files: WeightFiles, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build the folder's model without memory, with a score instead of the output embedding.

    A classifier of one label has its head in the files. From a language model the head begins as
    zeros: both rows of a pair then score 0, and the first loss is log 2.
    """
    model = build_with_head(folder, is_of_tokens="score.bias" in files.names, dtype=dtype)
    if "score.weight" in files.names:
        check_weights(model, files)
    else:
        check_weights(build_empty_model(folder, dtype=dtype), files)
        _begin_head_at_zero(model, device)
    return model


def build_with_head(folder: Path, *, is_of_tokens: bool, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model with one number as its output: transformers' class, or else alike."""
    task = "Token" if is_of_tokens else "Sequence"
    kind = AutoModelForTokenClassification if is_of_tokens else AutoModelForSequenceClassification
    has_class = type(load_model_config(folder)) in kind._model_mapping
    model = _build_empty(
        folder, kind if has_class else AutoModelForCausalLM, dtype=dtype, num_labels=1
    )
    name = type(model).__name__
    if not has_class:
        del model.lm_head
        size = model.config.hidden_size
        model.score = nn.Linear(size, 1, bias=is_of_tokens, device="meta", dtype=dtype)
        name = name.replace("CausalLM", f"{task}Classification")
    model.config.architectures = [name]
    return model


def _build_empty(
    folder: Path,
    kind: Any,  # noqa: ANN401 - one of transformers' factories
    *,
    dtype: torch.dtype,
    **changes: int,
) -> PreTrainedModel:
    """Build a model, turn dropout off, and make frozen parameters of buffers that are in files.

    Other buffers, as rotary frequencies, get their values, on the host.

    A policy gradient is taken at the policy that sampled. Buffers in files (the router's bias of
    GLM-4.5) are weights to everything that loads, shards, sends and exports them.
    """
    read_model_type(folder)  # names the errors of a folder that is none
    read_architecture(folder)  # refuses settings that would be ignored
    config = load_model_config(folder, **changes)
    with torch.device("meta"):
        model = build_by_config(config, kind, dtype=dtype, attention=PACKED_ATTENTION)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "residual_dropout"):  # Seed-OSS applies it as a function
            module.residual_dropout = 0.0
        for name, values in list(module.named_buffers(recurse=False)):
            if name in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(values, device="cpu"))
            else:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))
        if module._non_persistent_buffers_set:
            model._init_weights(module)  # parameters have no memory yet, and stay without
    return model


def build_by_config(
    config: PretrainedConfig,
    kind: Any = AutoModelForCausalLM,  # noqa: ANN401 - one of transformers' factories
    *,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Build a model on torch's current device; ``attention`` is transformers' name of it."""
    if config.model_type in SEEING:
        return build_seeing_model(config, dtype=dtype, attention=attention)
    model: PreTrainedModel = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def _begin_head_at_zero(model: PreTrainedModel, device: torch.device) -> None:
    model.score.to_empty(device=device)
    for parameter in model.score.parameters():
        nn.init.zeros_(parameter)


def check_weights(model: PreTrainedModel, files: WeightFiles) -> None:
    """Compare names and shapes of the model's weights by ``WeightFiles.require``."""
    weights = ModelFiles(files, model.config.model_type)
    wanted, known = (
        {
            stored: size
            for name, p in model.named_parameters(remove_duplicate=is_once)
            for stored, size in weights.shapes_of(name, p.shape).items()
        }
        for is_once in (True, False)
    )
    # Layers that predict further tokens, after the last one.
    left_out = model._keys_to_ignore_on_load_unexpected or ()
    further = {name for name in files.names if any(re.search(each, name) for each in left_out)}
    files.require(wanted, known={*known, *further}, model=type(model).__name__)


def fill_weights(
    module: nn.Module, prefix: str, weights: WeightSource, device: torch.device
) -> None:
    """Give each parameter below ``module`` that has no memory yet its values.

    Args:
        prefix: the submodule's Hugging Face name with a final dot; empty for the model.
    """
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            stored = weights.read(prefix + name, shape=parameter.shape)
            owner_name, _, leaf = name.rpartition(".")
            values = stored.to(device)  # half the bytes of bfloat16 converted before
            # A copy even on the CPU: the memory map is read-only and lasts as long as its file.
            values = values.to(parameter.dtype, copy=values is stored)
            filled = nn.Parameter(values, parameter.requires_grad)
            setattr(module.get_submodule(owner_name), leaf, filled)


def tie_head(model: PreTrainedModel) -> None:
    """Let the output embedding be the input embedding, if config.json says so."""
    head = model.get_output_embeddings()  # a critic has none
    if head is not None and model.config.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight


def finish_model(model: PreTrainedModel, device: torch.device) -> None:
    """Tie the output embedding, and move the buffers, which ``fill_weights`` does not."""
    tie_head(model)
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            setattr(module, name, module.get_buffer(name).to(device))


def _open_safetensors(path: Path) -> Any:  # noqa: ANN401 - safetensors ships no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} cannot be read: {err}; download the file again") from err


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_PER_READ = 4096


def require_usable_model(folder: Path) -> None:
    """Read settings and the headers of all weight files; values only of a duplicate head.

    Raises:
        ModelError: a file is missing or corrupt, weights are quantised, or the folder's tied output
            embedding differs from its input embedding, and would be ignored.
    """
    is_packed = is_mxfp4(read_settings(folder))
    is_tied = bool(load_model_config(folder).tie_word_embeddings)
    files = WeightFiles(folder)
    files.require_floats(but={n for n in files.names if is_packed and n.endswith(_MXFP4)})
    if not (is_tied and {_EMBEDDING, _HEAD} <= files.names):
        return
    shape, other = files.shape_of(_EMBEDDING), files.shape_of(_HEAD)
    is_same = shape == other
    for begin in range(0, shape[0] if is_same else 0, _ROWS_PER_READ):
        end = min(begin + _ROWS_PER_READ, shape[0])
        rows = [(begin, end), *((0, size) for size in shape[1:])]
        is_same = is_same and torch.equal(*(files.read_range(n, rows) for n in (_EMBEDDING, _HEAD)))
    if not is_same:
        raise ModelError(
            f"{folder}: config.json ties the output embedding to the input embedding "
            f"(tie_word_embeddings), and the files contain another {_HEAD}, "
            "which would be ignored; set tie_word_embeddings to false in config.json, or remove "
            f"{_HEAD}"
        )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name that a configuration has."""
