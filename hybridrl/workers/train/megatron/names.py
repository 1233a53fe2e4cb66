"""Names of parameters on megatron-core."""

from __future__ import annotations


def global_name(name: str, offset: int) -> str:
    """Return a parameter's name with the layer's number in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + offset)
    return ".".join(parts)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is A or B of an adapter."""
    return ".lora." in name
