"""``mode=check`` of a model folder: its files have the tensors of its architecture."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.errors import ConfigError, ModelError
from hybridrl.models.load import WeightFiles, build_empty_model, check_weights


def find_bad_weights(folder: Path) -> list[ConfigError]:
    """Compare names, shapes and types in the headers of the files; reads no values."""
    try:
        check_weights(build_empty_model(folder, dtype=torch.float32), WeightFiles(folder))
    except ModelError as error:
        return [ConfigError("model.path", str(folder), str(error), "download the folder again")]
    return []
