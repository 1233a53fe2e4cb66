from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hybridrl.sampler import Sample
from tests.workers.rollout.engines import (
    assert_samples,
    greedy_of_hugging_face,
    make_prompts,
    sampling_params,
)

WITHOUT_NCCL = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="in a build for CUDA SGLang joins ranks by NCCL, on a CPU, too",
)
WITHOUT_MOONCAKE = pytest.mark.skipif(
    find_spec("mooncake") is None,
    reason="needs mooncake-transfer-engine-non-cuda, and libibverbs1 and libnl-route-3-200",
)
NUM_TOKENS = 16
PROMPTS = make_prompts([3, 9, 5, 12])
GREEDY = sampling_params(group=1, tokens=NUM_TOKENS, top_k=1)
SMALL = (
    *("rollout=sglang", "rollout.num_slots=8", "rollout.drain_timeout_s=5"),
    *("data.max_prompt_tokens=12", f"rollout.max_response_tokens={NUM_TOKENS}"),
)


def groups(**sections: str) -> str:
    """The override that gives the policy these groups, as NAME=KEYS."""
    text = ", ".join(f"{name}: {{{section}}}" for name, section in sections.items())
    return f"serving.models={{policy: {{groups: {{{text}}}}}}}"


def assert_as_hugging_face(samples: Sequence[Sample], folder: Path) -> None:
    expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=NUM_TOKENS)
    assert_samples(samples, expected, atol=2e-5)
