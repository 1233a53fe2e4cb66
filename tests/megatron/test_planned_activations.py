"""What mode=plan says that autograd keeps is what it keeps of megatron-core's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.architecture import read_architecture
from hybridrl.planning.activations import Activations
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.workers.train.megatron.backend import MegatronBackend
from hybridrl.workers.train.megatron.context import MegatronContext
from tests.config.values import config_of
from tests.planning.test_memory import make_pack, workload_of
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL

TENSOR = "megatron.tensor_parallel_size=2"
SEQUENCE = "megatron.sequence_parallel=true"


def _keep(_rank: int, folder: Path, siblings: int, *overrides: str) -> int:
    """Compute one pack forward; return the bytes that autograd keeps beside the weights."""
    ranks = f"cluster.num_ranks_per_node={dist.get_world_size()}"
    megatron = config_of("actor=megatron", ranks, *overrides).megatron
    context = MegatronContext(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0)
    config = replace(ACTOR, engine="megatron")
    [model] = MegatronBackend(folder, config=config, context=context).stages.models
    model.requires_grad_()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = model(make_pack(num_prompts=8 // siblings, siblings=siblings), 1.0)
    del scored
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


CUTS: dict[str, tuple[str, ...]] = {"1": (), "tp2": (TENSOR,), "sp2": (TENSOR, SEQUENCE)}
BY_DAY = {("qwen3", "1", 4), ("llama", "tp2", 4), ("qwen3", "sp2", 1), ("llama", "1", 1)}


@pytest.mark.shows("6.8")
@pytest.mark.parametrize(
    ("family", "overrides", "siblings"),
    [
        pytest.param(
            *(family, overrides, siblings),
            id=f"{family}-{cut}-{siblings}",
            marks=[pytest.mark.nightly] * ((family, cut, siblings) not in BY_DAY),
        )
        for family in ("qwen3", "llama")
        for cut, overrides in CUTS.items()
        for siblings in (1, 4)
    ],
)
def test_activations_are_those_that_were_planned(
    tmp_path: Path, family: Family, overrides: tuple[str, ...], siblings: int
) -> None:
    folder = make_tiny_model(tmp_path, family, hidden_size=128, num_layers=3)
    num_ranks = 2 if overrides else 1
    config = config_of("actor=megatron", f"cluster.num_ranks_per_node={num_ranks}", *overrides)
    planned = ModelMemory(config, "actor", read_architecture(folder))
    microbatch = workload_of(siblings).microbatch(shares_prompts=True)
    predicted = Activations(planned, microbatch).saved
    for num_bytes in run_ranks(num_ranks, _keep, folder, siblings, *overrides):
        assert num_bytes == pytest.approx(predicted, rel=0.04)
