"""One rank writes what all ranks gather."""

from __future__ import annotations

import pytest
import torch

from hybridrl.errors import RunFolderError
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import write_on_first
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
