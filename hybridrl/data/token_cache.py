"""Tokenized prompts of large sets, kept on disk: a resumed run need not render them again.

A file holds rendered texts and token ids. Its name is a digest of everything that these depend on,
so a file is never stale; one that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.data.rows import Row, fingerprint
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

_FORMAT = 1
_PACKAGES = ("transformers", "tokenizers", "jinja2")

Rendered = tuple[str, Tensor]
"""The text of a prompt, and its tokens, int64 [L]."""


def cache_file(
    folder: Path,
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Path | None:
    """Return the file of these rows, which need not exist; None if the tokenizer is not known.

    Args:
        folder: of all such files.
        rows: their text and order count.
        tokenizer: its vocabulary, rules and template count, if it is one of the fast ones.
        use_chat_template: whether prompts are wrapped.
        tools: schemas that the template shows.
    """
    if not tokenizer.is_fast:
        return None
    parts = [
        *(_FORMAT, fingerprint(rows), use_chat_template),
        *(tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template),
        *(tokenizer.special_tokens_map, [version(package) for package in _PACKAGES]),
        *([list(tools)] if tools else []),
    ]
    digest = hashlib.sha256(to_json_text(parts).encode()).hexdigest()
    return folder / f"{digest[:32]}.npz"


def read_rendered(file: Path, *, num_rows: int) -> list[Rendered] | None:
    """Read all prompts; None if there is no such file, or it is not complete."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            texts, token_ids = arrays["texts"].tobytes(), torch.from_numpy(arrays["token_ids"])
            ends = [list(accumulate(arrays[f"{n}_lengths"].tolist())) for n in ("text", "token")]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        log.warning("tokens are made again: %s cannot be read: %s", file, error)
        return None
    if any(len(of_kind) != num_rows for of_kind in ends):
        return None
    text_spans, token_spans = (pairwise([0, *of_kind]) for of_kind in ends)
    log.info("tokens of %d prompts come from %s", num_rows, file)
    return [
        (texts[a:b].decode(), token_ids[c:d].long())
        for (a, b), (c, d) in zip(text_spans, token_spans, strict=True)
    ]


def write_rendered(file: Path, rendered: Sequence[Rendered]) -> None:
    """Write prompts atomically. A disk that refuses costs no run: the log says so."""
    texts = [text.encode() for text, _ in rendered]
    token_ids = torch.cat([tokens for _, tokens in rendered]).to(torch.int32)
    unfinished = file.with_name(f".unfinished-{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            unfinished,
            texts=np.frombuffer(b"".join(texts), dtype=np.uint8),
            text_lengths=np.array([len(text) for text in texts]),
            token_ids=token_ids.numpy(),
            token_lengths=np.array([len(tokens) for _, tokens in rendered]),
        )
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        log.warning("tokens are not kept: %s cannot be written: %s", file, error)
