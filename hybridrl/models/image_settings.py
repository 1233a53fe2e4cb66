"""How a model wants its images: its configuration and that of its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.model import STARTER_SIDE, ModelConfig
from hybridrl.errors import ModelError
from hybridrl.images import ImageSettings
from hybridrl.models.architecture import starter_tower
from hybridrl.models.model_folder import PROCESSORS, read_json, vision_settings

PROCESSOR, _PREPROCESSOR = PROCESSORS
_STARTER_IMAGES = {
    "patch_size": STARTER_SIDE // 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": STARTER_SIDE**2, "longest_edge": 64 * STARTER_SIDE**2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
STARTER_PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor": _STARTER_IMAGES | {"image_processor_type": "Qwen2VLImageProcessor"},
    "video_processor": _STARTER_IMAGES | {"video_processor_type": "Qwen2VLVideoProcessor"},
}
"""The processor of a model that is made on the spot."""

STARTER_VISION_TOKENS = {
    "vision_start_token_id": 258,
    "image_token_id": 259,
    "vision_end_token_id": 260,
    "video_token_id": 261,
}
"""In the order of ``data/starter_tokenizer.py``, behind its 258 other tokens."""


def in_sections(settings: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a model that sees; ``settings`` are what is read of one.

    Ids of tokens that are not among them are those of a made model.
    """
    names = ("vision_config", "tie_word_embeddings", *STARTER_VISION_TOKENS)
    text = {name: value for name, value in settings.items() if name not in (*names, "text_config")}
    model_type = settings["model_type"].removesuffix("_text")
    of_both = {name: settings[name] for name in names if name in settings}
    return {**STARTER_VISION_TOKENS, **of_both, "model_type": model_type, "text_config": text}


def image_settings_of(model: ModelConfig, *, max_pixels: int | None) -> ImageSettings | None:
    """Return how the model of a run cuts images; see ``read_image_settings``."""
    if model.path is not None:
        return read_image_settings(Path(model.path), max_pixels=max_pixels)
    if model.starter is None or not model.starter.num_vision_layers:
        return None
    tower = starter_tower(model.starter) | STARTER_VISION_TOKENS
    return _settings(tower, _STARTER_IMAGES, max_pixels, Path("model.starter"))


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
    file = folder / PROCESSOR
    own = read_json(file).get("image_processor") if file.is_file() else None
    if own is None:
        file = folder / _PREPROCESSOR
        own = read_json(file)
    return _settings(tower, own, max_pixels, file)


def _settings(
    tower: Mapping[str, Any], own: Mapping[str, Any], max_pixels: int | None, file: Path
) -> ImageSettings:
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
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise ModelError(
            f"{file} does not say how images are cut ({err!r}); download the folder again"
        ) from err
    if not settings.side**2 <= settings.min_pixels <= settings.max_pixels:
        raise ModelError(
            f"{file}: images may have {settings.min_pixels} to {settings.max_pixels} pixels, and "
            f"one token takes {settings.side**2}; raise data.max_image_pixels, or download the "
            "folder again"
        )
    return settings


def _colours(values: Any) -> tuple[float, float, float]:  # noqa: ANN401 - of a JSON file
    red, green, blue = (float(value) for value in values)
    return red, green, blue
