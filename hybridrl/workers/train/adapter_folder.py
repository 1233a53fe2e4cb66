"""Writing an adapter's peft folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from hybridrl.models.adapter import WEIGHTS_FILE, Adapter
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import atomic_folder
from hybridrl.workers.train.protocol import NamedTensors
from hybridrl.workers.train.residence import write_on_first


def write_adapter_folder(
    folder: Path, weights: NamedTensors, *, adapter: Adapter, base_model: Path, ranks: Ranks
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, atomically.

    Args:
        folder: must not exist.
        weights: A and B by their names in the file, whole.
        adapter: whose settings are written.
        base_model: the folder of the frozen model.
        ranks: all that gather the weights. The first one writes; every one returns, or raises, when
            it is done.

    Raises:
        RunFolderError: the folder exists already, or cannot be written.
    """

    def write(weights: NamedTensors) -> None:
        with atomic_folder(folder) as unfinished:
            tensors = {name: tensor.contiguous().cpu() for name, tensor in weights}
            save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
            adapter.save_settings(unfinished, base_model=base_model)

    write_on_first(ranks, weights, write)
