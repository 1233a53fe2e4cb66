"""Images of rows, from what data files hold to what engines get.

Data files spell images in three ways: parts of a message (``{"type": "image", "image": ...}``), a
column of images with ``<image>`` in the text for each (verl), or without: then they stand before
the text of the first user (TRL). Here a message has a mark for each, and the row their sources.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from PIL import Image as Pillow

from hybridrl.data.pixels import (
    SizedImage,
    identity_of,
    keep_pixels,
    load_remotely,
    read_image,
    resized,
    source_of_bytes,
    source_of_image,
)
from hybridrl.data.rows import IMAGE_MARK, Malformed, Message, RawMessage, Row
from hybridrl.errors import DataError, shown
from hybridrl.images import Image, Images, ImageSettings
from hybridrl.models.model_folder import SEEING

_MARK_IN_FILES = "<image>"
_SOURCES = ("image", "path", "url", "image_url", "bytes")


def begin_to_load(prompts: Sequence[Sequence[SizedImage]]) -> list[Images]:
    """Let processes of Ray read and resize the images of some prompts; each is read once."""
    wanted = list(dict.fromkeys(image for images in prompts for image in images))
    identities = [identity_of(image) for image in wanted]  # first: a file may be gone
    loaded = {}
    for image, name, pixels in zip(wanted, identities, load_remotely(wanted), strict=True):
        size = (image.height // image.side, image.width // image.side)
        loaded[image] = Image(*size, name, pixels)
    return [tuple(loaded[image] for image in images) for images in prompts]


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
    num_marks = sum(message.content.count(IMAGE_MARK) for message in messages)
    if parser.sources and num_marks > len(parser.sources):
        raise Malformed(f"has the character {IMAGE_MARK!a}, which stands for an image here")
    return tuple(messages), tuple(parser.sources)


class _ImageParser:
    """Puts marks into the messages of one row."""

    def __init__(self, column: object, folder: Path) -> None:
        self._folder = folder
        is_empty = column is None or column == ""  # of a table
        given = column if isinstance(column, list | tuple) else () if is_empty else (column,)
        self.waiting = deque(self._source(each) for each in given)
        self._has_column = bool(self.waiting)
        self.sources: list[str] = []

    def content(self, content: str | list[object]) -> str:
        """Return a message's text with marks."""
        if isinstance(content, str):
            return self._text(content)
        text = "".join(self._part(part) for part in content)
        if not text.strip():
            raise Malformed("has a message without text and image")
        return text

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
            try:
                return source_of_image(given)
            except DataError as error:
                raise Malformed(str(error)) from error
        if not isinstance(given, str) or not given:
            kinds = "a path, bytes, a data: URL or an image of Pillow"
            raise Malformed(f"has the image {shown(given)}, must be {kinds}")
        if given.startswith(("http://", "https://")):
            raise Malformed(f"has the image {shown(given)}: download it, and give its path")
        if given.startswith("data:"):
            return given
        return str((self._folder / given.removeprefix("file://")).absolute())


def with_images(prompt: str | Sequence[Message], images: Images) -> list[Message]:
    """Return messages, each with the images of its marks; a text is a user's."""
    messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    left = iter(images)
    return [
        replace(each, images=tuple(islice(left, each.content.count(IMAGE_MARK))))
        for each in messages
    ]


async def look_at(
    messages: Sequence[RawMessage], origin: str, settings: ImageSettings | None
) -> list[Message]:
    """Read and resize the images of messages now, in threads; Malformed as `size_images`."""
    marked, sources = parse_images(tuple(messages), None, origin)
    reads = (asyncio.to_thread(_load, source, settings) for source in sources)
    return with_images(marked, tuple(await asyncio.gather(*reads)))


def _load(source: str, settings: ImageSettings | None) -> Image:
    if settings is None:
        raise Malformed("has an image, and the model sees none")
    file, height, width = _fitted(source, settings)
    identity, pixels = keep_pixels(resized(file, height=height, width=width))
    return Image(height // settings.side, width // settings.side, identity, pixels)


def _fitted(source: str, settings: ImageSettings) -> tuple[Pillow.Image, int, int]:
    """Read an image; return it with the height and width that the model wants it in."""
    try:
        image = read_image(source)
        return image, *settings.fit(image.height, image.width)
    except DataError as error:
        raise Malformed(str(error)) from error


def size_images(row: Row, settings: ImageSettings | None) -> tuple[SizedImage, ...] | None:
    """Read the images of a row once, and return their sizes; None if the model sees none.

    Malformed if an image is bad, or if the model sees none and there are some.
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
        image, height, width = _fitted(source, settings)
        sized.append(
            SizedImage(
                source,
                height=height,
                width=width,
                side=settings.side,
                placeholder=settings.placeholder,
                file_height=image.height,
                file_width=image.width,
            )
        )
    return tuple(sized)


def expand(
    token_ids: Sequence[int], images: Sequence[SizedImage | Image], placeholder: int
) -> Sequence[int]:
    """Repeat the placeholder of each image for all its tokens; raises Malformed."""
    count = token_ids.count(placeholder)
    if count != len(images):
        raise Malformed(
            f"has {len(images)} images, and its text {count} of their placeholders (token "
            f"{placeholder}); take other placeholders out of the row, or correct the chat template"
        )
    if not images:
        return token_ids
    repeated = zip(token_ids, num_repeats(token_ids, images, placeholder), strict=True)
    return [token for token, num_times in repeated for _ in range(num_times)]


def num_repeats(
    token_ids: Sequence[int], images: Sequence[SizedImage | Image], placeholder: int | None
) -> list[int]:
    """Return as how many tokens each token of a prompt's text stands in the prompt."""
    left = iter(images)
    return [next(left).num_tokens if token == placeholder else 1 for token in token_ids]
