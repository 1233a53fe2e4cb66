"""Images in requests to SGLang: one placeholder each, and a PNG in a data URL."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO

from PIL import Image as Picture
from pybase64 import b64encode
from torch import Tensor

from hybridrl.errors import SampledPlaceholderError
from hybridrl.images import Image

_CACHED_CHARACTERS = 1 << 28
"""Of all URLs that a process keeps."""

_FAST = 1  # zlib's level: a loopback is faster than deflate
_urls: OrderedDict[int, str] = OrderedDict()
"""By identity of the image, the last used at the end."""


def collapsed(
    token_ids_L: Tensor, images: Sequence[Image], begins: Sequence[int], placeholder: int
) -> list[int]:
    """Return the tokens with one placeholder for each image, which SGLang repeats by itself.

    A SampledPlaceholderError if there are further ones: SGLang would wait for their images for
    ever.
    """
    is_sent_L = token_ids_L >= 0
    for image, begin in zip(images, begins, strict=True):
        is_sent_L[begin + 1 : begin + image.num_tokens] = False
    sent: list[int] = token_ids_L[is_sent_L].tolist()
    if sent.count(placeholder) != len(images):
        num_tokens = sum(image.num_tokens for image in images)
        raise SampledPlaceholderError(
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
    file = BytesIO()
    Picture.fromarray(image.fetch()).save(file, "PNG", compress_level=_FAST)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
