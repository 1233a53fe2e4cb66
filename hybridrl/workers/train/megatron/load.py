"""Filling this rank's tensors from a Hugging Face folder, reading no more than they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hybridrl.config.architecture import Architecture
from hybridrl.errors import ModelError
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.blocks import blocks_of
from hybridrl.workers.train.megatron.hf_tensors import HEAD, hf_tensors
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank


def check_files(files: WeightFiles, architecture: Architecture) -> None:
    """Compare names and shapes in the files with what the architecture needs.

    Raises:
        ModelError: tensors are missing, left over or of another shape; names all of them. Or one
            is quantised.
    """
    files.require_floats()
    wanted = hf_tensors(architecture)
    # A copy of tied weights and, in old llama folders, rotary frequencies do no harm.
    surplus = {
        name
        for name in files.names - wanted.keys()
        if not name.endswith("rotary_emb.inv_freq") and not (architecture.is_tied and name == HEAD)
    }
    misshapen = [
        f"{name} {list(shape_in_file)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in files.names and (shape_in_file := files.shape_of(name)) != shape
    ]
    problems = [
        *_name_all("missing", (name for name in wanted if name not in files.names)),
        *_name_all("not of this architecture", sorted(surplus)),
        *_name_all("of another shape", misshapen),
    ]
    if problems:
        raise ModelError(
            f"the safetensors do not belong to their config.json ({architecture.model_type}): "
            f"{'; '.join(problems)}; point model.path at a folder whose files belong together"
        )


@torch.no_grad()
def load_weights(
    local: Mapping[str, Tensor],
    files: WeightFiles,
    *,
    architecture: Architecture,
    parallel: ParallelRank,
) -> None:
    """Give this rank's tensors their values, cast to their type; padding becomes 0.

    What is in no file, an adapter or a critic's head, is left as it is. No collective: each rank
    reads its own boxes through the memory map.

    Args:
        local: live tensors by megatron-core's names, with global layer numbers.
        files: of the model's folder.
        architecture: of the same folder.
        parallel: this rank.

    Raises:
        ModelError: the files do not fit the architecture, or the tensors do not.
    """
    check_files(files, architecture)
    in_files = hf_tensors(architecture)
    for name, tensor in local.items():
        blocks = blocks_of(name, tensor.shape, architecture=architecture, parallel=parallel)
        for block in blocks:
            if block.name in in_files:
                tensor[block.begin : block.end].copy_(files.read_box(block.name, block.box))
        tensor[blocks[-1].end if blocks else 0 :].zero_()


def _name_all(problem: str, names: Iterable[str]) -> list[str]:
    listed = list(names)
    return [f"{len(listed)} {problem}: {', '.join(listed)}"] if listed else []
