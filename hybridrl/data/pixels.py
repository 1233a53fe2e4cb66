"""The pixels of images in rows: read in bounded memory, and every bad file is named.

Imports neither torch nor transformers: so a process of Ray that reads images begins at once.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from hybridrl.errors import DataError, shown

_IMAGES_A_TASK = 32  # a process of Ray takes longer to begin than so many small images to load
_MAX_PIXELS = 50_000_000  # 150 MB as red, green and blue
_DATA, _BASE64 = "data:", ";base64,"
_MAX_CHARS = 60


def source_of_bytes(data: bytes) -> str:
    """Return the bytes of an image file as text, a ``data:`` URL."""
    return f"{_DATA}image/*{_BASE64}{b64encode(data).decode()}"


def source_of_image(image: Image.Image) -> str:
    """Return an image of Pillow as a PNG file in text."""
    file = BytesIO()
    image.save(file, "PNG")
    return source_of_bytes(file.getvalue())


def read_image(source: str) -> Image.Image:
    """Read an image in full, as red, green and blue, turned as its camera says.

    Raises:
        DataError: there is no such file, it is no image or a part of one, it moves, or it has over
            50 million pixels.
    """
    name = shown(source) if len(source) <= _MAX_CHARS else f"{source[:_MAX_CHARS]}..."
    try:
        # Pillow's own limit, for one that is not decoded yet, is ours.
        with Image.open(_open(source)) as image:
            num_pixels = image.width * image.height
            if num_pixels > _MAX_PIXELS:
                raise DataError(
                    f"the image {name} has {image.width} x {image.height} pixels, and may have "
                    f"{_MAX_PIXELS:,} in all; make it smaller"
                )
            if (num_frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(
                    f"the image {name} moves: it has {num_frames} frames, and may have 1; take one"
                )
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                upright = upright.point(lambda value: value / 256).convert("L")
            return upright.convert("RGB")
    except FileNotFoundError as error:
        raise DataError(f"there is no image {name}; paths are relative to the data file") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is no image that Pillow knows; convert it to PNG") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image {name} cannot be read: {error}; write it again") from error


def _open(source: str) -> BytesIO | Path:
    if not source.startswith(_DATA):
        return Path(source)
    _, is_base64, text = source.partition(_BASE64)
    if not is_base64:
        raise ValueError("its data: URL must hold base64")
    try:
        return BytesIO(b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(f"its data: URL holds no base64 ({error})") from error


def load_pixels(source: str, height: int, width: int) -> NDArray[np.uint8]:
    """Read an image and resize it; returns uint8 [height, width, 3]."""
    image = read_image(source)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.array(image)


def load_remotely(
    wanted: Sequence[tuple[str, int, int]],
) -> list[ray.ObjectRef[NDArray[np.uint8]]]:
    """Begin ``load_pixels`` of each in processes of Ray, a few images in each."""
    begun: list[ray.ObjectRef[NDArray[np.uint8]]] = []
    for first in range(0, len(wanted), _IMAGES_A_TASK):
        images = wanted[first : first + _IMAGES_A_TASK]
        task = ray.remote(num_cpus=0, num_returns=len(images))(_load_all)
        references = task.remote(images)
        begun += references if len(images) > 1 else [references]
    return begun


def _load_all(wanted: Sequence[tuple[str, int, int]]) -> Any:  # noqa: ANN401 - as Ray wants it
    pixels = [load_pixels(*each) for each in wanted]
    return pixels if len(pixels) > 1 else pixels[0]


def identity_of(source: str, height: int, width: int) -> int:
    """Name the pixels of ``load_pixels``, in [1, 2^62); those of a file as it is now."""
    facts: list[object] = [source, height, width]
    if not source.startswith(_DATA):
        try:
            status = Path(source).stat()
        except OSError as error:
            raise DataError(f"the image {shown(source)} is there no more: {error}") from error
        facts += [status.st_size, status.st_mtime_ns]
    digest = blake2b(repr(facts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) | 1
