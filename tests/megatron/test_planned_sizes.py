"""What mode=plan counts on a rank is what megatron-core builds there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.architecture import read_architecture
from hybridrl.planning.split import Split
from tests.megatron.models import build_local_model
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model


def _count(_rank: int, folder: Path, tp: int, pp: int, ep: int, etp: int) -> tuple[int, int]:
    from megatron.core import parallel_state

    model = build_local_model(read_architecture(folder), tp=tp, pp=pp, ep=ep, etp=etp)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stage, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.shows("6.8")
@pytest.mark.parametrize(
    ("family", "is_tied", "tp", "pp", "ep", "etp"),
    [
        ("qwen2", True, 2, 2, 1, 1),
        ("qwen3", False, 2, 1, 1, 1),
        ("llama", True, 1, 2, 1, 1),
        ("qwen3_moe", False, 2, 2, 1, 2),
        ("mixtral", True, 1, 2, 2, 1),
        ("qwen2_moe", False, 2, 1, 2, 1),
    ],
)
def test_each_rank_has_as_many_parameters_as_were_planned(
    tmp_path: Path, family: Family, is_tied: bool, tp: int, pp: int, ep: int, etp: int
) -> None:
    folder = make_tiny_model(tmp_path, family, tie_embeddings=is_tied, vocab_size=61)
    num_ranks = pp * max(tp, ep * etp)
    for stage, built in run_ranks(num_ranks, _count, folder, tp, pp, ep, etp):
        split = Split(
            tensor=tp,
            pipeline=pp,
            expert=ep,
            expert_tensor=etp,
            num_ranks=num_ranks,
            stage=stage,
            pads_vocabulary=True,
        )
        assert split.count(read_architecture(folder)).total == built
