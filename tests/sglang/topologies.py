"""What the tests of topologies share: groups, prompts, and Hugging Face's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hybridrl.sampler import Sample
from tests.sglang.engines import greedy_of_hugging_face
from tests.workers.rollout.engines import make_prompts, sampling_params

NUM_TOKENS = 16
PROMPTS = make_prompts([3, 9, 5, 12])
GREEDY = sampling_params(group=1, tokens=NUM_TOKENS, top_k=1)
SMALL = (
    *("rollout=sglang", "rollout.num_slots=8", "rollout.drain_timeout_s=5"),
    *("data.max_prompt_tokens=12", f"rollout.max_response_tokens={NUM_TOKENS}"),
    "data.max_digits=11",
)


def groups(**sections: str) -> str:
    """The override that gives the policy these groups, as NAME=KEYS."""
    text = ", ".join(f"{name}: {{{section}}}" for name, section in sections.items())
    return f"serving.models={{policy: {{groups: {{{text}}}}}}}"


def assert_as_hugging_face(
    samples: Sequence[Sample | tuple[list[int], list[float]]], folder: Path
) -> None:
    """Tokens and log-probs, of the first token as of the others."""
    expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=NUM_TOKENS)
    for sample, answer in zip(samples, expected, strict=True):
        token_ids, logprobs = _as_lists(sample)
        assert token_ids == answer.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(logprobs), answer.logprobs, atol=2e-5, rtol=0)


def _as_lists(sample: Sample | tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    if isinstance(sample, Sample):
        return sample.token_ids.tolist(), sample.logprobs.tolist()
    return sample
