"""Images in requests to SGLang: one placeholder each, and a PNG in a data URL."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pybase64 import b64encode
from torch import Tensor

from hybridrl.errors import RequestError
from hybridrl.images import Image, image_begins

_CACHED_CHARACTERS = 1 << 28
"""Of all URLs that a process keeps."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2  # colour type
_FAST = 1  # zlib's level: a loopback is faster than deflate
_urls: OrderedDict[int, str] = OrderedDict()
"""By identity of the image, the last used at the end."""


def collapsed(token_ids_L: Tensor, images: Sequence[Image], placeholder: int) -> list[int]:
    """Return the tokens with one placeholder for each image, which SGLang repeats by itself.

    Raises:
        RequestError: there are further placeholders: SGLang would wait for images without an end.
    """
    is_sent_L = token_ids_L >= 0
    begins = image_begins(token_ids_L, images, placeholder)
    for image, begin in zip(images, begins, strict=True):
        is_sent_L[begin + 1 : begin + image.num_tokens] = False
    sent: list[int] = token_ids_L[is_sent_L].tolist()
    if sent.count(placeholder) != len(images):
        num_tokens = sum(image.num_tokens for image in images)
        raise RequestError(
            f"{len(images)} images take {num_tokens} placeholders (token {placeholder}), and the "
            f"context has {int((token_ids_L == placeholder).sum())}; SGLang takes no others"
        )
    return sent


async def data_url(image: Image) -> str:
    """Return the image as a PNG; made once a process, but for images that were not used for long.

    In a thread, because its pixels may come from another machine.
    """
    url = _urls.pop(image.identity, None)
    if url is None:
        url = await asyncio.to_thread(_encode, image)
    _urls[image.identity] = url
    while sum(map(len, _urls.values())) > _CACHED_CHARACTERS:
        _urls.popitem(last=False)
    return url


def _encode(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(png(image.fetch())).decode()}"


def png(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """Write a PNG (ISO 15948) of uint8 [H, W, 3]: no row is filtered."""
    height, width, _ = pixels_HWC.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter
    rows[:, 1:] = pixels_HWC.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _FAST)), (b"IEND", b""))
    return _SIGNATURE + b"".join(map(_chunk, parts))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    data = b"".join(part)
    return struct.pack(">I", len(part[1])) + data + struct.pack(">I", zlib.crc32(data))
