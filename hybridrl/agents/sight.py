"""What tools, environments and programs show: messages whose images are read and resized once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from hybridrl.data.images import load_image, parse_shown
from hybridrl.data.rows import Malformed, Message, RawMessage
from hybridrl.images import Images, ImageSettings

Shown = tuple[tuple[Message, ...], Images]
"""Messages with a mark for each image, and the images in order."""


async def look_at(
    messages: Sequence[RawMessage], folder: Path, settings: ImageSettings | None
) -> Shown:
    """Read the images of messages, in threads.

    Args:
        folder: at which relative paths begin.
        settings: how the model cuts images; None: it sees none.

    Raises:
        Malformed: an image is bad (``read_image``, ``ImageSettings.fit``), or the model sees none
            and there are some.
    """
    shown, sources = parse_shown(messages, folder)
    if settings is None:
        if sources:
            raise Malformed(f"has {len(sources)} images, and the model sees none")
        return shown, ()
    reads = (asyncio.to_thread(load_image, source, settings) for source in sources)
    return shown, tuple(await asyncio.gather(*reads))
