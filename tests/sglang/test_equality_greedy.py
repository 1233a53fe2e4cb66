"""What SGLang answers is what Hugging Face answers, with the weights of every sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.workers.rollout.protocol import Response
from hybridrl.workers.rollout.sglang import SGLangEngine
from tests.models import Family, make_tiny_model
from tests.sglang.engines import (
    greedy_of_hugging_face,
    running_engine,
    server_spec,
    sync,
    weights_of,
)
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of

PROMPTS = make_prompts((1, 7, 33, 12, 2))
# SGLang gives a Qwen3-MoE an output embedding of its own, whatever config.json says: it cannot be
# tied there (0.5.21), and no published one is.
TIED: dict[Family, bool] = {"qwen3": True, "llama": True, "qwen3_moe": False}
GREEDY = sampling_params(group=1, tokens=8, temperature=0.0)


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_moe"])
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def family_engine(
    family: Family, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    if family == "qwen3":
        yield request.getfixturevalue("shared_engine")
        return
    folder = make_tiny_model(tmp_path_factory.mktemp("boot"), family, tie_embeddings=TIED[family])
    with running_engine(server_spec(folder, routed_experts=family == "qwen3_moe")) as it:
        yield it


def test_greedy_tokens_and_log_probs_are_those_of_hugging_face_after_each_sync(
    family: Family, family_engine: SGLangEngine, tmp_path: Path
) -> None:
    answers = []
    for version in range(3):
        folder = make_tiny_model(
            tmp_path / str(version), family, seed=version, tie_embeddings=TIED[family]
        )
        sync(family_engine, weights_of(folder), version=version)
        found = family_engine.generate(PROMPTS, GREEDY)
        expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=8)
        assert tokens_of(found) == tokens_of(expected)
        for response, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(response.logprobs, reference.logprobs, atol=2e-4, rtol=0)
        if family == "qwen3_moe":
            check_experts(folder, found)
        answers.append(tokens_of(found))
    assert answers[0] != answers[1] != answers[2]


def check_experts(folder: Path, responses: list[Response]) -> None:
    """The experts of every token but the last are those that Hugging Face's router chooses."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, response in zip(PROMPTS.token_ids_PL.unbind(), responses, strict=True):
        row = torch.cat([prompt, response.token_ids])[:-1]
        with torch.no_grad():
            output = model(row[None], output_router_logits=True)
        chosen = torch.stack(
            [
                logits.topk(model.config.num_experts_per_tok).indices
                for logits in output.router_logits
            ],
            dim=1,
        )
        found = response.routed_experts_LJK
        assert found is not None
        assert torch.equal(found.long().sort(-1).values, chosen.sort(-1).values)
