"""The pixels of images in rows: read in bounded memory, and every bad file is named.

Imports neither torch nor transformers: so a process of Ray that reads images begins at once.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from ray.exceptions import RayTaskError

from hybridrl.errors import DataError, shown

_IMAGES_A_TASK = 32  # a process of Ray takes longer to begin than so many small images to load
_MAX_PIXELS = 50_000_000  # 150 MB as red, green and blue
_TOO_MANY = f"more than {_MAX_PIXELS:,} pixels; make it smaller"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of EPS a program would be run
_DATA, _BASE64 = "data:", ";base64,"
_PNG = "data:image/png;base64,"
_MAX_CHARS = 60
_THUMBNAIL_SIDE = 96  # pixels: about 15 KB of a photo


@dataclass(frozen=True, slots=True)
class SizedImage:
    """An image of a row, and the size that a model wants it in."""

    source: str  # see ``Row.images``
    height: int  # pixels
    width: int
    side: int  # pixels of a token's square
    placeholder: int  # token id
    file_height: int  # pixels before it is resized
    file_width: int

    @property
    def num_tokens(self) -> int:
        """Placeholders in the prompt."""
        return (self.height // self.side) * (self.width // self.side)


def source_of_bytes(data: bytes) -> str:
    """Return the bytes of an image file as text, a ``data:`` URL."""
    return f"{_DATA}image/*{_BASE64}{b64encode(data).decode()}"


def source_of_image(image: Image.Image) -> str:
    """Return an image of Pillow as a PNG file in text; raises DataError as ``read_image``."""
    file = BytesIO()
    with _named(f"{image.width} x {image.height} pixels of Pillow"):
        _flatten(image, "of Pillow").save(file, "PNG")
    return source_of_bytes(file.getvalue())


def read_image(source: str) -> Image.Image:
    """Read an image in full, as red, green and blue, upright, and on white if it is transparent.

    Raises:
        DataError: there is no such file, it is no image or a part of one, it moves, or it has over
            50 million pixels.
    """
    name = shown(source) if len(source) <= _MAX_CHARS else f"{source[:_MAX_CHARS]}..."
    with _named(name), Image.open(_open(source), formats=_FORMATS) as image:
        return _flatten(image, name).convert("RGB")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise what goes wrong as a DataError; Pillow answers a broken file with any error."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no image {name}; paths begin at the file with them") from error
    except UnidentifiedImageError as error:
        known = ", ".join(_FORMATS)
        raise DataError(f"{name} is no image of {known}; convert it to PNG") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name} has {_TOO_MANY}") from error
    except Exception as error:
        raise DataError(f"the image {name} cannot be read: {error}; write it again") from error


def _flatten(image: Image.Image, name: str) -> Image.Image:
    """Return an image as grey, or as red, green and blue."""
    if image.width * image.height > _MAX_PIXELS:  # before it is decoded
        raise DataError(f"{name}, of {image.width} x {image.height}, has {_TOO_MANY}")
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1 and image.format != "MPO":  # a photo, and smaller copies of it
        raise DataError(f"the image {name} has {num_frames} frames, and may have 1; take one")
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):  # Pillow would cut values off at 255
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if upright.mode in ("I", "F"):
        raise DataError(f"the image {name} has 32 bits a colour; write it with 8 or 16")
    if upright.has_transparency_data:
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright.convert("RGBA"))
    return upright if upright.mode == "L" else upright.convert("RGB")


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


def load_pixels(image: SizedImage) -> NDArray[np.uint8]:
    """Read an image and resize it; returns uint8 [height, width, 3]."""
    pixels = read_image(image.source)
    if pixels.size != (image.file_width, image.file_height):
        raise DataError(
            f"the image {shown(image.source)} has {pixels.width} x {pixels.height} pixels, and had "
            f"{image.file_width} x {image.file_height} when its row was read; bring that one back, "
            "or touch the data file, so that it is read again"
        )
    return resized(pixels, height=image.height, width=image.width)


def resized(image: Image.Image, *, height: int, width: int) -> NDArray[np.uint8]:
    """Return the pixels of an image in this size, uint8 [height, width, 3]."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.array(image)


def thumbnail(pixels: NDArray[np.uint8]) -> str:
    """Return a small copy for people to look at, a ``data:`` URL of a PNG file."""
    image, file = Image.fromarray(pixels), BytesIO()
    image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    image.save(file, "PNG")
    return f"{_PNG}{b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True, slots=True)
class LoadedPixels:
    """Pixels that are in Ray's memory, or that a process of Ray loads."""

    reference: ray.ObjectRef[NDArray[np.uint8]]

    def __call__(self) -> NDArray[np.uint8]:
        """Wait for the pixels; a view of Ray's memory. A DataError as of ``load_pixels``."""
        try:
            fetched: NDArray[np.uint8] = ray.get(self.reference)
        except RayTaskError as error:
            if isinstance(error.cause, DataError):
                raise DataError(str(error.cause)) from error
            raise
        return fetched


def keep_pixels(pixels: NDArray[np.uint8]) -> tuple[int, LoadedPixels]:
    """Leave pixels in Ray's memory on this machine; return their name, and where they are."""
    name = _to_identity(repr(pixels.shape).encode() + pixels.tobytes())
    return name, LoadedPixels(ray.put(pixels))


def load_remotely(wanted: Sequence[SizedImage]) -> list[LoadedPixels]:
    """Begin ``load_pixels`` of each in processes of Ray, a few images in each."""
    begun: list[ray.ObjectRef[NDArray[np.uint8]]] = []
    for first in range(0, len(wanted), _IMAGES_A_TASK):
        images = wanted[first : first + _IMAGES_A_TASK]
        task = ray.remote(num_cpus=0, num_returns=len(images))(_load_all)
        references = task.remote(images)
        begun += references if len(images) > 1 else [references]
    return [LoadedPixels(reference) for reference in begun]


def _load_all(wanted: Sequence[SizedImage]) -> Any:  # noqa: ANN401 - as Ray wants it
    pixels = [load_pixels(image) for image in wanted]
    return pixels if len(pixels) > 1 else pixels[0]


def identity_of(image: SizedImage) -> int:
    """Name the pixels of ``load_pixels``, in [1, 2^62); those of a file as it is now."""
    facts: list[object] = [image.source, image.height, image.width]
    if not image.source.startswith(_DATA):
        try:
            status = Path(image.source).stat()
        except OSError as error:
            raise DataError(
                f"the image {shown(image.source)} is there no more ({error}); bring it back"
            ) from error
        facts += [status.st_size, status.st_mtime_ns]
    return _to_identity(repr(facts).encode())


def _to_identity(data: bytes) -> int:
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 2) | 1
