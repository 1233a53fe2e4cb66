"""One rank writes what all ranks gather."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridrl.errors import RunFolderError
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import write_hf_folder, write_on_first
from hybridrl.workers.train.protocol import NamedTensors
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _fail_to_write(rank: int) -> tuple[str, str]:
    def weights() -> NamedTensors:
        yield "w", torch.zeros(2)

    def write(_: NamedTensors) -> None:
        raise ValueError("temperature without do_sample")

    with pytest.raises((ValueError, RunFolderError)) as caught:
        write_on_first(Ranks(CPU), weights(), write)
    return type(caught.value).__name__, str(caught.value)


def test_export_error_reaches_all_ranks() -> None:
    message = "temperature without do_sample"
    assert run_ranks(2, _fail_to_write) == [("ValueError", message), ("RunFolderError", message)]


class _Written:
    """A configuration that transformers writes without a setting that it does not know."""

    def save_pretrained(self, save_directory: str | Path) -> None:
        settings = {"model_type": "deepseek_v3", "dtype": "float32", "vocab_size": 4}
        Path(save_directory, "config.json").write_text(json.dumps(settings))


def test_an_export_keeps_settings_that_transformers_does_not_write(tmp_path: Path) -> None:
    source = {"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(source))
    folder = tmp_path / "exported"
    write_hf_folder(folder, [], specs=[], configs=[_Written()], source=tmp_path)
    assert json.loads((folder / "config.json").read_text()) == {
        **{"model_type": "deepseek_v3", "dtype": "float32", "vocab_size": 4},
        "topk_method": "noaux_tc",
    }
