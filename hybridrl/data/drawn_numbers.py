"""Numbers drawn with Pillow's own font: images to read that need no download."""

from __future__ import annotations

import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hybridrl.config.model import STARTER_SIDE as SIDE
from hybridrl.data.pixels import source_of_image

_SHIFT = 5  # pixels at most that a digit is moved, to the right and upwards
_DARKEST = 150
_NOISE = 12.0  # standard deviation, in steps of 0 to 255


def draw_number(digits: str, source: random.Random) -> str:
    """Draw digits side by side, a bit moved, in greys and with noise; return a PNG as data URL."""
    image = Image.new("L", (SIDE * len(digits), SIDE))
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(size=SIDE)
    for at, digit in enumerate(digits):
        corner = (at * SIDE + source.randint(0, _SHIFT), -source.randint(0, _SHIFT))
        canvas.text(corner, digit, fill=source.randint(_DARKEST, 255), font=font)
    noise = np.random.default_rng(source.getrandbits(32)).normal(0.0, _NOISE, image.size[::-1])
    pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
    return source_of_image(Image.fromarray(pixels))
