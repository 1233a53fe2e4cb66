"""What megatron-core must be told of weights so that it sums and counts gradients rightly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from hybridrl.config.megatron import MegatronConfig
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.megatron.stand_ins import install
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    assert_same_weights,
    make_rows,
    update,
    weights_of,
)


def _train(
    _rank: int, folder: Path, sizes: dict[str, int | bool]
) -> tuple[list[float], dict[str, Tensor]]:
    install()
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    megatron = replace(MegatronConfig(), **sizes)  # type: ignore[arg-type]
    backend = MegatronBackend(
        folder,
        config=replace(ACTOR, engine="megatron"),
        context=MegatronContext(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0),
        num_total_steps=10,
    )
    engine = PolicyEngine(backend)
    norms = [update(engine, make_rows(8, seed=seed))["policy/grad_norm"] for seed in range(2)]
    return norms, weights_of(engine)


@pytest.mark.parametrize("expert_tensor_parallel_size", [1, 2])
def test_experts_learn_from_the_tokens_of_all_ranks(
    tmp_path: Path, expert_tensor_parallel_size: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", tie_embeddings=False)
    [(norms, weights)] = run_ranks(1, _train, folder, {})
    sizes = {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
    }
    for rank_norms, rank_weights in run_ranks(2, _train, folder, sizes):
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert_same_weights(rank_weights, weights, atol=2e-5)
