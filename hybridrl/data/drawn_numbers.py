"""Numbers drawn with Pillow's own font: images to read that need no download."""

from __future__ import annotations

import random
from base64 import b64encode
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 16
"""Pixels of the square that a digit stands in: one token of the model that is made on the spot."""

_SHIFT = 3  # pixels at most that a digit is moved, to the right and upwards
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
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
