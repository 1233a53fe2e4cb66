"""An environment, an agent and tools of a user that show images. Needs no torch."""

from __future__ import annotations

import random
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from hybridrl.data.drawn_numbers import draw_number


def draw(width: int, height: int, seed: int) -> Image.Image:
    return Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(3 * width * height)
    )


def to_file(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def part(image: object) -> dict[str, object]:
    return {"type": "image", "image": image}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


class Album:
    """Shows images of several sizes, given in all ways, for three turns."""

    def reset(self, row: Any, seed: int) -> object:
        self.num_steps, self.seed = 0, seed
        return [text("What is this \ufffc?"), part(draw(40, 60, seed))]

    def step(self, action: str) -> tuple[object, float, bool]:
        self.num_steps += 1
        one, two = draw(70, 60, self.seed), draw(90, 30, self.seed + 1)
        url = {"url": f"data:image/png;base64,{b64encode(to_file(two)).decode()}"}
        observations: list[object] = [
            [
                {
                    "role": "user",
                    "content": [text("these"), part(to_file(one)), text("and"), part(one)],
                }
            ],
            [{"type": "image_url", "image_url": url}, text("?")],
            [text("the last, "), text("without")],
        ]
        return observations[(self.num_steps - 1) % 3], 1.0, self.num_steps == 4


class Digits:
    """Shows another digit in each of three turns; one that is read, and length, earn points."""

    def reset(self, row: Any, seed: int) -> object:
        self.random, self.num_steps = random.Random(seed), 0
        return self._draw()

    def step(self, action: str) -> tuple[object, float, bool]:
        self.num_steps += 1
        reward = float(action == self.digit) + 0.1 * (len(action) % 3)
        return self._draw(), reward, self.num_steps == 3

    def _draw(self) -> list[dict[str, object]]:
        self.digit = str(self.random.randrange(10))
        return [part(draw_number(self.digit, self.random)), text("=")]


def spoilt(kind: str) -> object:
    """Return an image that cannot be shown, or one that can."""
    if kind == "large":  # made for those alone that ask for it
        return to_file(Image.new("1", (10_000, 6_000)))
    whole = to_file(draw(80, 80, 1))
    frames = BytesIO()
    draw(30, 30, 1).save(frames, "GIF", save_all=True, append_images=[draw(30, 30, 2)])
    images: dict[str, object] = {
        "good": whole,
        "other": to_file(draw(80, 80, 2)),
        "cut": whole[: len(whole) // 2],
        "moving": frames.getvalue(),
        "narrow": draw(500, 2, 1),
        "text": "data:image/png;base64,aGVsbG8=",
        "missing": "not_there.png",
        "link": "https://example.org/a.png",
        "number": 7,
        "path": str(Path("good.png")),
    }
    return images[kind]


class Spoilt:
    """Shows the image that the turn asks for."""

    def reset(self, row: Any, seed: int) -> None:
        pass

    def step(self, action: str) -> tuple[object, float, bool]:
        return [part(spoilt(action))], 1.0, action == "end"


def look(kind: str) -> object:
    """Look at a picture.

    Args:
        kind: Which
    """
    return [text("Here:"), part(spoilt(kind)), text("\ufffc")]


async def peek(kind: str) -> object:
    """Look at a picture for a moment.

    Args:
        kind: Which
    """
    return look(kind)


def describe() -> str:
    """Describe a picture."""
    return "\ufffc"
