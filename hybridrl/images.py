"""Images of prompts: how a model cuts them into patches, and where they stand among tokens.

Rows are read in ``data/images.py``; a tower gets their patches in ``models/seeing.py``.
An image is resized once, to full patches, so all engines see the same pixels. Its tokens stand in
the prompt as repeated placeholders, one for each square of ``merge`` x ``merge`` patches.

Legend: L tokens, H and W pixels, C colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrl.errors import DataError, RequestError

_WIDEST = 200  # times that an image may be longer than it is wide, or wider than long


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """How a model cuts images; from its config.json and preprocessor_config.json."""

    placeholder: int  # token id that stands for a part of an image
    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    frames: int  # times that a still image is repeated: towers also take films
    min_pixels: int
    max_pixels: int  # smaller and larger images are resized into these limits
    mean: tuple[float, float, float]
    # of red, green and blue, in [0, 1]: what the tower gets is `(value / 255 - mean) / std`
    std: tuple[float, float, float]

    @property
    def side(self) -> int:
        """Pixels of the side of one token's square."""
        return self.patch * self.merge

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels that an image is resized to.

        Multiples of a token's side, within the limits, of nearly the same shape: transformers'
        ``smart_resize``, so an image of such a size is left as it is there, and in SGLang.

        Raises:
            DataError: one side is over 200 times the other.
        """
        if max(height, width) > _WIDEST * min(height, width):
            raise DataError(
                f"an image of {width} x {height} pixels is too narrow: one side may have "
                f"{_WIDEST} times the pixels of the other at most"
            )
        side = self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image of a prompt, as it travels with the tokens; the pixels stay where they were made."""

    rows: int  # of tokens
    columns: int
    identity: int  # in [1, 2^62), the same for equal pixels
    # uint8 [H, W, C], `rows` and `columns` times the side of a token's square; or a call that waits
    # for them, since they are, or will be, somewhere else
    pixels: Callable[[], NDArray[np.uint8]] | NDArray[np.uint8]

    @property
    def num_tokens(self) -> int:
        """Placeholders in the prompt."""
        return self.rows * self.columns

    def fetch(self) -> NDArray[np.uint8]:
        """Return the pixels, a view of Ray's memory; DataError if the file is gone or another."""
        return self.pixels if isinstance(self.pixels, np.ndarray) else self.pixels()


Images = tuple[Image, ...]
"""Of one prompt, in their order."""


def image_begins(token_ids_L: Tensor, images: Sequence[Image], placeholder: int) -> list[int]:
    """Return the token where each image begins; DataError if the placeholders are not theirs.

    A placeholder after the last image was sampled: to the model it is a token like others.
    """
    at = (token_ids_L == placeholder).nonzero()[:, 0].tolist() if images else []
    begins, taken = [], 0
    for number, image in enumerate(images):
        run = at[taken : taken + image.num_tokens]
        if len(run) < image.num_tokens or run[-1] - run[0] != len(run) - 1:
            raise DataError(
                f"image {number} of {len(images)} takes {image.num_tokens} placeholders "
                f"(token {placeholder}) in a row, and the prompt has {len(run)}"
            )
        begins.append(run[0])
        taken += image.num_tokens
    return begins


def require_images_fit(
    token_ids_L: Tensor, images: Sequence[Image], settings: ImageSettings | None
) -> list[int]:
    """Return the token where each image of a request begins.

    RequestError if the model sees none and there are some, or their placeholders are not there.
    """
    if settings is None:
        if images:
            raise RequestError(f"the request has {len(images)} images, and the model sees none")
        return []
    try:
        return image_begins(token_ids_L, images, settings.placeholder)
    except DataError as error:
        raise RequestError(str(error)) from error


def with_identities(token_ids_L: Tensor, images: Sequence[Image], begins: Sequence[int]) -> Tensor:
    """Return tokens in which those of images say which: equal ones come of equal prompts alone."""
    if not images:
        return token_ids_L
    marked_L = token_ids_L.clone()
    for image, begin in zip(images, begins, strict=True):
        marked_L[begin : begin + image.num_tokens] = -image.identity
    return marked_L


def positions(num_tokens: int, images: Sequence[Image], begins: Sequence[int]) -> Tensor:
    """Return time, row and column of each token, int64 [3, L] (arXiv:2409.12191, 2.1).

    Of text all three are equal. An image's tokens have the time of its begin, and their rows and
    columns from there; what follows it continues after the largest of them.
    """
    position_3L = torch.arange(num_tokens).expand(3, -1).clone()
    for image, begin in zip(images, begins, strict=True):
        end = begin + image.num_tokens
        first = int(position_3L[0, begin])
        grid = torch.cartesian_prod(torch.arange(image.rows), torch.arange(image.columns))
        position_3L[1:, begin:end] = first + grid.reshape(-1, 2).T
        position_3L[0, begin:end] = first
        position_3L[:, end:] += position_shift([image])
    return position_3L


def position_shift(images: Sequence[Image]) -> int:
    """Return the difference of position and number of a token behind the images."""
    return -sum(image.num_tokens - max(image.rows, image.columns) for image in images)


def patches(pixels_HWC: Tensor, settings: ImageSettings) -> Tensor:
    """Cut one image, uint8 [H, W, 3], into what a tower takes: float32 [patches, numbers].

    Patches of one token are neighbours. The numbers of a patch are colours, frames, rows, columns.
    """
    height, width, num_colours = pixels_HWC.shape
    patch, merge = settings.patch, settings.merge
    mean, std = (torch.tensor(v, device=pixels_HWC.device) for v in (settings.mean, settings.std))
    values = (pixels_HWC.float() / 255 - mean) / std
    squares = values.reshape(
        height // settings.side, merge, patch, width // settings.side, merge, patch, num_colours
    )
    ordered = squares.permute(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    repeated = ordered.expand(*ordered.shape[:5], settings.frames, *ordered.shape[6:])
    num_patches = (height // patch) * (width // patch)
    return repeated.reshape(num_patches, num_colours * settings.frames * patch**2)
