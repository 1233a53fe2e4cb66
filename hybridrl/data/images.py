"""Images of rows, from what data files hold to what engines get.

Data files spell images in three ways: parts of a message (``{"type": "image", "image": ...}``), a
column of images with ``<image>`` in the text for each (verl), or without: then they stand before
the text of the first user (TRL). Here a message has a mark for each, and the row their sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image as Pillow

from hybridrl.data.pixels import (
    identity_of,
    load_remotely,
    read_image,
    source_of_bytes,
    source_of_image,
)
from hybridrl.data.rows import IMAGE_MARK, Malformed, Message, Row
from hybridrl.errors import DataError, shown
from hybridrl.images import Image, Images, ImageSettings
from hybridrl.models.model_folder import SEEING

_MARK_IN_FILES = "<image>"
_SOURCES = ("image", "path", "url", "image_url", "bytes")


class RawMessage(NamedTuple):
    """A message as a file has it."""

    role: str
    content: str | list[object]


@dataclass(frozen=True, slots=True)
class SizedImage:
    """An image of a row, and the size that a model wants it in."""

    source: str  # see `Row.images`
    height: int  # pixels
    width: int
    side: int  # pixels of a token's square

    @property
    def num_tokens(self) -> int:
        """Placeholders in the prompt."""
        return (self.height // self.side) * (self.width // self.side)


def begin_to_load(prompts: Sequence[Sequence[SizedImage]]) -> list[Images]:
    """Let processes of Ray read and resize the images of some prompts; each is read once."""
    files = {(i.source, i.height, i.width): i for images in prompts for i in images}
    loaded = {}
    for (key, image), pixels in zip(files.items(), load_remotely(list(files)), strict=True):
        size = (image.height // image.side, image.width // image.side)
        loaded[key] = Image(*size, identity_of(*key), pixels)
    return [tuple(loaded[i.source, i.height, i.width] for i in images) for images in prompts]


def parse_images(
    prompt: str | tuple[RawMessage, ...], column: object, origin: str
) -> tuple[str | tuple[Message, ...], tuple[str, ...]]:
    """Return a prompt with a mark for each image, and the sources of all; raises Malformed.

    Args:
        column: of images, if the file has one; None or empty: none.
        origin: as in ``Row``; paths are relative to the folder of its file.
    """
    parser = _ImageParser(column, Path(origin.rpartition(":")[0]).parent)
    if isinstance(prompt, str):
        if not parser.waiting:
            return prompt, ()
        prompt = (RawMessage("user", prompt),)
    messages = [Message(message.role, parser.content(message.content)) for message in prompt]
    if parser.waiting and not parser.sources:
        first = next((n for n, each in enumerate(messages) if each.role == "user"), 0)
        marks = IMAGE_MARK * len(parser.waiting)
        messages[first] = Message(messages[first].role, marks + messages[first].content)
        parser.sources += parser.waiting
    elif parser.waiting:
        raise Malformed(f"has {len(parser.waiting)} images more than places for them")
    return tuple(messages), tuple(parser.sources)


class _ImageParser:
    """Puts marks into the messages of one row."""

    def __init__(self, column: object, folder: Path) -> None:
        self._folder = folder
        if column and not isinstance(column, list | tuple):
            column = [column]
        self.waiting = deque(self._source(each) for each in column or ())  # type: ignore[attr-defined]
        self._has_column = bool(self.waiting)
        self.sources: list[str] = []

    def content(self, content: str | list[object]) -> str:
        """Return a message's text with marks."""
        if isinstance(content, str):
            return self._text(content)
        return "".join(self._part(part) for part in content)

    def _part(self, part: object) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
            return self._text(part["text"])
        if not isinstance(part, Mapping) or kind not in ("image", "image_url"):
            raise Malformed(f"has the part {shown(part)}, must be of type text or image")
        given = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
        return self._next() if given is None else self._mark(self._source(given))

    def _text(self, text: str) -> str:
        if not self._has_column:
            return text
        first, *others = text.split(_MARK_IN_FILES)
        if any(IMAGE_MARK in each for each in (first, *others)):
            raise Malformed(f"has the character {IMAGE_MARK!a}, which stands for an image here")
        return first + "".join(self._next() + other for other in others)

    def _next(self) -> str:
        if not self.waiting:
            raise Malformed("has more places for images than images")
        return self._mark(self.waiting.popleft())

    def _mark(self, source: str) -> str:
        self.sources.append(source)
        return IMAGE_MARK

    def _source(self, given: object) -> str:
        if isinstance(given, Mapping):
            inner = next((given[n] for n in reversed(_SOURCES) if given.get(n) is not None), None)
            return self._source(inner)
        if isinstance(given, bytes):
            return source_of_bytes(given)
        if isinstance(given, Pillow.Image):
            return source_of_image(given)
        if not isinstance(given, str) or not given:
            raise Malformed(f"has the image {shown(given)}, must be a path, bytes or a data: URL")
        if given.startswith(("http://", "https://")):
            raise Malformed(f"has the image {shown(given)}: download it, and give its path")
        if given.startswith("data:"):
            return given
        return str((self._folder / given.removeprefix("file://")).absolute())


def size_images(row: Row, settings: ImageSettings | None) -> tuple[SizedImage, ...] | None:
    """Read the images of a row once, and return their sizes; None if the model sees none.

    Raises:
        Malformed: an image is bad, or the model sees none and there are some.
    """
    if settings is None:
        if row.images:
            raise Malformed(
                f"has {len(row.images)} images, and the model sees none; set model.path to one "
                f"that does ({', '.join(SEEING)}), or data.images_key=null"
            )
        return None
    sized = []
    for source in row.images:
        try:
            image = read_image(source)
            height, width = settings.fit(image.height, image.width)
        except DataError as error:
            raise Malformed(str(error)) from error
        sized.append(SizedImage(source, height, width, settings.side))
    return tuple(sized)


def expand(
    token_ids: Sequence[int], images: Sequence[SizedImage], *, placeholder: int, origin: str
) -> list[int]:
    """Repeat the placeholder of each image for all its tokens."""
    count = token_ids.count(placeholder)
    if count != len(images):
        raise DataError(
            f"{origin}: the chat template gives {count} placeholders (token {placeholder}) for "
            f"{len(images)} images; correct it, or set data.use_chat_template=true"
        )
    sizes = iter(images)
    expanded: list[int] = []
    for token in token_ids:
        expanded += [token] * (next(sizes).num_tokens if token == placeholder else 1)
    return expanded
