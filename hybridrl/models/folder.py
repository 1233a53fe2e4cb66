"""Check of a model folder, once, by the driver, before a worker starts."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.errors import ModelError
from hybridrl.models.load import WeightFiles, load_model_config
from hybridrl.models.model_folder import read_settings

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_PER_READ = 4096


def require_usable_model(folder: Path) -> None:
    """Read settings and the headers of all weight files; values only of a duplicate head.

    Raises:
        ModelError: a file is missing or corrupt, weights are quantised, or the folder's tied output
            embedding differs from its input embedding.
    """
    read_settings(folder)
    is_tied = bool(load_model_config(folder).tie_word_embeddings)
    files = WeightFiles(folder)
    files.require_floats()
    if is_tied and {_EMBEDDING, _HEAD} <= files.names:
        _require_same_head(files, folder)


def _require_same_head(files: WeightFiles, folder: Path) -> None:
    """Reject a tied model with a second output embedding, which would be ignored."""
    shape, other = files.shape_of(_EMBEDDING), files.shape_of(_HEAD)
    is_same = shape == other
    for begin in range(0, shape[0] if is_same else 0, _ROWS_PER_READ):
        end = min(begin + _ROWS_PER_READ, shape[0])
        rows = [(begin, end), *((0, size) for size in shape[1:])]
        is_same = is_same and torch.equal(*(files.read_range(n, rows) for n in (_EMBEDDING, _HEAD)))
    if not is_same:
        raise ModelError(
            f"{folder}: config.json ties the output embedding to the input embedding "
            f"(tie_word_embeddings), and the files contain another {_HEAD}, "
            "which would be ignored; set tie_word_embeddings to false in config.json, or remove "
            f"{_HEAD}"
        )
