"""How a model folder wants its images: its configuration and that of its image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.errors import ModelError
from hybridrl.images import ImageSettings
from hybridrl.models.model_folder import read_json, vision_settings

_PROCESSOR = "processor_config.json"
_PREPROCESSOR = "preprocessor_config.json"


def read_image_settings(folder: Path, *, max_pixels: int | None = None) -> ImageSettings | None:
    """Return how the model of a folder cuts images; None if it has no tower that is used.

    Args:
        max_pixels: a limit below the folder's own.

    Raises:
        ModelError: the folder does not describe its image processor, or impossibly.
    """
    tower = vision_settings(folder)
    if tower is None:
        return None
    file = folder / _PROCESSOR  # of transformers 5; older folders have a file for images alone
    own = read_json(file).get("image_processor") if file.is_file() else None
    if own is None:
        file = folder / _PREPROCESSOR
        own = read_json(file)
    size = own.get("size") or {}
    try:
        smallest, largest = (
            int(own.get(old) or size.get(new) or size[old])
            for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        settings = ImageSettings(
            placeholder=int(tower["image_token_id"]),
            patch=int(tower["patch_size"]),
            merge=int(tower["spatial_merge_size"]),
            frames=int(tower["temporal_patch_size"]),
            min_pixels=smallest,
            max_pixels=largest if max_pixels is None else min(largest, max_pixels),
            mean=_colours(own["image_mean"]),
            std=_colours(own["image_std"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise ModelError(
            f"{file} does not say how images are cut ({err!r}); download the folder again"
        ) from err
    if not settings.side**2 <= settings.min_pixels <= settings.max_pixels:
        raise ModelError(
            f"{file}: images may have {settings.min_pixels} to "
            f"{settings.max_pixels} pixels, and one token takes {settings.side**2}; raise "
            "data.max_image_pixels, or download the folder again"
        )
    return settings


def _colours(values: Any) -> tuple[float, float, float]:  # noqa: ANN401 - of a JSON file
    red, green, blue = (float(value) for value in values)
    return red, green, blue
