"""Names of tensors in a model with adapters, and in files and rollout engines.

Within the model peft calls a frozen weight ``X.base_layer.weight`` and the matrices beside it
``X.lora_A.NAME.weight`` and ``X.lora_B.NAME.weight``. In Hugging Face folders and rollout engines
the weight is ``X.weight``; in adapter files a matrix is ``base_model.model.X.lora_A.weight``. Of a
model that sees X is another in its adapter's file (``name_beside_tower``), not in rollout engines.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.config.model import LoraConfig

ADAPTER_NAME = "default"
"""Name of the only adapter within the model; files do not contain it."""

WEIGHTS_FILE = "adapter_model.safetensors"
"""Peft's name for the file of an adapter's weights."""

_PREFIX = "base_model.model."
_TOWER = "visual."
_WEIGHT = ".weight"


def is_adapter_name(name: str) -> bool:
    """Whether a tensor is a matrix A or B, by any of its names."""
    return ".lora_A." in name or ".lora_B." in name


def is_in_tower(module_name: str) -> bool:
    """Whether a layer is one of a vision tower, to which rollout engines apply no adapter."""
    return module_name.startswith(_TOWER)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a frozen parameter."""
    return name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """Return the name of an adapter's parameter in ``adapter_model.safetensors``."""
    return _PREFIX + name.replace(f".{ADAPTER_NAME}.weight", ".weight")


def name_beside_tower(name: str) -> str:
    """Return the name in the file of an adapter's matrix in a model that sees.

    Transformers has the language model and the tower within another module.
    """
    inner = name.removeprefix(_PREFIX)
    return f"{_PREFIX}model.{inner if is_in_tower(inner) else f'language_{inner}'}"


def matrix_names(module_name: str) -> tuple[str, str]:
    """Return the names in the file of the matrices A and B beside a layer."""
    return f"{_PREFIX}{module_name}.lora_A.weight", f"{_PREFIX}{module_name}.lora_B.weight"


def adapter_shapes(
    weights: Mapping[str, tuple[int, ...]], lora: LoraConfig
) -> dict[str, tuple[int, ...]]:
    """Return names in the file and shapes of a complete adapter of a model with these weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        layer = name.removesuffix(_WEIGHT)
        is_adapted = layer != name and layer.rpartition(".")[2] in lora.modules
        if is_adapted and not is_in_tower(layer):
            outputs, inputs = shape
            name_a, name_b = matrix_names(layer)
            shapes |= {name_a: (lora.rank, inputs), name_b: (outputs, lora.rank)}
    return shapes
