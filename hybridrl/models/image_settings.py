"""How a model folder wants its images: config.json and preprocessor_config.json together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.errors import ModelError
from hybridrl.images import ImageSettings
from hybridrl.models.model_folder import read_json, vision_settings

PREPROCESSOR = "preprocessor_config.json"


def read_image_settings(folder: Path, *, max_pixels: int | None = None) -> ImageSettings | None:
    """Return how the model of a folder cuts images; None if it has no tower that is used.

    Args:
        max_pixels: a limit below the folder's own.

    Raises:
        ModelError: the folder has no ``preprocessor_config.json``, or a value of it is impossible.
    """
    tower = vision_settings(folder)
    if tower is None:
        return None
    own = read_json(folder / PREPROCESSOR)
    size = own.get("size") or {}
    smallest = own.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    largest = own.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    try:
        settings = ImageSettings(
            placeholder=int(tower["image_token_id"]),
            patch=int(tower["patch_size"]),
            merge=int(tower["spatial_merge_size"]),
            frames=int(tower["temporal_patch_size"]),
            min_pixels=int(smallest),
            max_pixels=int(largest) if max_pixels is None else min(int(largest), max_pixels),
            mean=_colours(own["image_mean"]),
            std=_colours(own["image_std"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ModelError(
            f"{folder / PREPROCESSOR} does not say how images are cut ({err!r}); download the "
            "folder again"
        ) from err
    if not settings.side**2 <= settings.min_pixels <= settings.max_pixels:
        raise ModelError(
            f"{folder / PREPROCESSOR}: images may have {settings.min_pixels} to "
            f"{settings.max_pixels} pixels, and one token takes {settings.side**2}; raise "
            "data.max_image_pixels, or download the folder again"
        )
    return settings


def _colours(values: Any) -> tuple[float, float, float]:  # noqa: ANN401 - of a JSON file
    red, green, blue = (float(value) for value in values)
    return red, green, blue
