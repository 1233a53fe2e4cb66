"""Two schedulers share one model over gloo, and answer as one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sglang.engines import (
    greedy_of_hugging_face,
    running_engine,
    server_spec,
    sync,
    weights_of,
)
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of

PROMPTS = make_prompts((5, 33, 2))
GREEDY = sampling_params(group=2, tokens=6, temperature=0.0)


def one_core_each(num_ranks: int) -> dict[str, str]:
    """SGLang wants to be told where its ranks run when they outnumber the NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    names = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(names)}


@pytest.mark.nightly
def test_a_server_of_two_ranks_answers_as_hugging_face_after_each_of_two_syncs(
    tmp_path: Path,
) -> None:
    folders = [make_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    spec = server_spec(folders[0], tensor_parallel_size=2)
    with running_engine(spec, variables=one_core_each(2)) as engine:
        for version, folder in enumerate(folders):
            sync(engine, weights_of(folder), version=version)
            found = engine.generate(PROMPTS, GREEDY)
            expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=6)
            assert tokens_of(found) == [r for r in tokens_of(expected) for _ in range(2)]
