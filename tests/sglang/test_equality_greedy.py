from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.batch import LogprobBatch, RolloutBatch, spread_over_tokens
from hybridrl.metrics import Sum
from hybridrl.models.load import ModelFiles, WeightFiles, load_model_config
from hybridrl.sampler import Sample, Sampler
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import OpenResponses, single_turn
from tests.contract.ranks_under_test import Rank, take_step
from tests.sglang.engines import running_engine, server_spec, sync, weights_of
from tests.tiny_models import SEEING, Family, make_mxfp4_model, make_seeing_model, make_tiny_model
from tests.workers.device import largest_mismatch_nats
from tests.workers.rollout.engines import (
    assert_samples,
    greedy_of_hugging_face,
    make_prompts,
    ready_engine,
    sampling_params,
    scoring_request,
    stop,
    tokens_of,
)
from tests.workers.train.engines import build_fsdp2, make_rows, update
from tests.workers.train.megatron.expert_layouts import running

PROMPTS = make_prompts((1, 7, 33, 12, 2))
# SGLang gives mixtures an output embedding of their own, whatever config.json says: it cannot be
# tied there (0.5.21), and no published one is. Nor has it the windows of Mistral, or layers
# without experts.
EXPERTS: tuple[Family, ...] = (
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "qwen3_5_moe_text",
    "qwen3_next",
    "deepseek_v3",
    "glm4_moe_lite",
)
ROUTED: tuple[Family, ...] = ("qwen3_moe", "qwen2_moe")  # Mixtral's would end the server
CHANGES: dict[Family, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": []},
}
GREEDY = sampling_params(group=1, tokens=8, temperature=0.0)


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3", "qwen3_moe"),
        *(
            pytest.param(family, marks=pytest.mark.nightly)
            for family in (
                *("ernie4_5", "gemma3_text", "glm4", "granite", "llama", "ministral3", "mistral"),
                *("mixtral", "olmo2", "qwen2", "qwen2_moe", "seed_oss", "smollm3"),
                *("ernie4_5_moe", "glm4_moe", "gpt_oss"),
                *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
                *("deepseek_v3", "glm4_moe_lite"),
            )
        ),
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def family_engine(
    family: Family, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    if family == "qwen3":
        yield request.getfixturevalue("shared_engine")
        return
    folder = make_served(tmp_path_factory.mktemp("boot"), family)
    with running_engine(server_spec(folder, returns_experts=family in ROUTED)) as it:
        yield it


def make_served(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """A tiny model that SGLang computes as transformers does."""
    is_tied, changes = family not in EXPERTS, CHANGES.get(family, {})
    return make_tiny_model(folder, family, seed=seed, tie_embeddings=is_tied, **changes)


@pytest.mark.nightly
def test_a_folder_in_mxfp4_is_served_with_the_weights_that_come(tmp_path: Path) -> None:
    folder = make_mxfp4_model(tmp_path / "packed")
    config = load_model_config(folder)
    files = ModelFiles(WeightFiles(folder), "gpt_oss")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(files.read(name, shape=parameter.shape))
    model.save_pretrained(tmp_path / "unpacked")
    with running_engine(server_spec(folder)) as engine:
        sync(engine, dict(model.named_parameters()), version=0)
        found = engine.run(single_turn(PROMPTS, GREEDY))
    expected = greedy_of_hugging_face(tmp_path / "unpacked", PROMPTS, num_tokens=8)
    assert_samples(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SEEING)
def test_the_language_model_of_one_that_sees_is_served_alone(kind: str, tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path / "whole", kind)
    trainer = build_fsdp2(folder)
    with running_engine(server_spec(folder)) as engine:
        sync(engine, dict(trainer.full_weights()), version=0)
        found = engine.run(single_turn(PROMPTS, sampling_params(group=1, tokens=8)))
    rollouts = assemble_rollouts(PROMPTS, found, policy_version=0)
    assert largest_mismatch_nats(trainer, rollouts, temperature=1.0) < 2e-4


@pytest.mark.shows("3.7")
def test_greedy_tokens_are_those_of_hugging_face_after_each_sync(
    family: Family,
    family_engine: SGLangEngine,
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    answers = []
    for version in range(3):
        folder = make_served(tmp_path / str(version), family, seed=version)
        sync(family_engine, weights_of(folder), version=version)
        found = family_engine.run(single_turn(PROMPTS, GREEDY))
        expected = greedy_of_hugging_face(folder, PROMPTS, num_tokens=8)
        assert_samples(found, expected)
        pairs = zip(found, expected, strict=True)
        record_property(
            "sglang", float(max((a.logprobs - b.logprobs).abs().max() for a, b in pairs))
        )
        if family in ROUTED:
            check_experts(folder, found)
        answers.append(tokens_of(found))
    assert answers[0] != answers[1] != answers[2]


def _learn_by_both(
    rank: Rank, folder: Path, rollouts: RolloutBatch, target: Path
) -> tuple[Tensor, Tensor]:
    """Score with and without the rollout's routes; learn, and write what was learned."""
    engine = rank.policy(folder)
    replayed = engine.compute_logprobs(rollouts, temperature=0.7)
    advantages_B = torch.linspace(-1, 1, len(rollouts))
    advantages_BL = spread_over_tokens(advantages_B, rollouts.response_mask_BL)
    logprobs = LogprobBatch(old_logprobs_BL=replayed.logprobs_BL, batch_size=rollouts.batch_size)
    take_step(engine, build_train_batch(rollouts, logprobs, advantages_BL))
    engine.export_hf(target)
    rank.free_routes()
    free = rank.policy(folder).compute_logprobs(rollouts, temperature=0.7)
    return replayed.logprobs_BL.values(), free.logprobs_BL.values()


@pytest.mark.nightly  # by day: check_experts above, and tests/workers/train/megatron/test_replay.py
@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_a_trainer_that_replays_routes_agrees_with_the_engine_over_steps(
    family_engine: SGLangEngine, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "0", "qwen3_moe", seed=5, tie_embeddings=False)
    (folder / "tokenizer.json").write_text("{}")
    sampling = replace(sampling_params(group=4, tokens=8), temperature=0.7)
    with running("tp2-sp-ep2", replays_routes=True) as ranks:
        for version in range(2):
            sync(family_engine, weights_of(folder), version=version)
            responses = family_engine.run(single_turn(PROMPTS, sampling))
            rollouts = assemble_rollouts(PROMPTS, responses, policy_version=version)
            target = tmp_path / str(version + 1)
            mask = rollouts.response_mask_BL.values()
            sampled = rollouts.sampler_logprobs_BL.values()[mask]
            for scores in ranks.run(_learn_by_both, folder, rollouts, target):
                replayed, free = (float((s[mask] - sampled).abs().max()) for s in scores)
                assert replayed < 1e-4
                assert replayed <= free + 1e-5
            assert not torch.equal(
                weights_of(target)["lm_head.weight"], weights_of(folder)["lm_head.weight"]
            )
            folder = target


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_experts_of_fsdp2_sample_as_they_score_over_steps(
    family_engine: SGLangEngine, tmp_path: Path
) -> None:
    trainer = build_fsdp2(make_tiny_model(tmp_path, "qwen3_moe", seed=8, tie_embeddings=False))
    sampling = replace(sampling_params(group=4, tokens=8), temperature=0.7)
    for version in range(3):
        sync(family_engine, dict(trainer.full_weights()), version=version)
        responses = family_engine.run(single_turn(PROMPTS, sampling))
        rollouts = assemble_rollouts(PROMPTS, responses, policy_version=version)
        assert largest_mismatch_nats(trainer, rollouts, temperature=0.7) < 2e-4
        update(trainer, make_rows(4, seed=version))


def check_experts(folder: Path, responses: list[Sample]) -> None:
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


@pytest.mark.parametrize("num_likeliest", [0, 4])
def test_tokens_that_are_there_are_scored_as_the_embedded_engine_does(
    engine: SGLangEngine, served_model: Path, num_likeliest: int
) -> None:
    samples = engine.run(single_turn(PROMPTS, sampling_params(group=1, tokens=8)))

    async def score(sampler: Sampler) -> list[list[Sample]]:
        rows = zip(PROMPTS.token_ids_PL.unbind(), samples, strict=True)
        asked = [
            sampler.answer(scoring_request(*row, num_likeliest=num_likeliest, temperature=1.0))
            for row in rows
        ]
        return await asyncio.gather(*asked)

    embedded = ready_engine(served_model, max_context_tokens=96).run(score)
    for (found,), (expected,), sample in zip(engine.run(score), embedded, samples, strict=True):
        assert torch.equal(found.token_ids, sample.token_ids)
        assert found.teacher_JL is not None
        assert expected.teacher_JL is not None
        assert found.teacher_JL.shape == (1 + 2 * num_likeliest, 8)
        torch.testing.assert_close(found.teacher_JL, expected.teacher_JL, atol=1e-4, rtol=0)


CUT = make_prompts((4, 30, 5, 60, 6, 85))  # the context of 96 tokens ends each response
CUT_SAMPLING = sampling_params(group=2, tokens=90, temperature=0.0)


@pytest.mark.timeout(200)
def test_phases_of_a_server_give_what_one_phase_gives(engine: SGLangEngine) -> None:
    uncut = engine.run(single_turn(CUT, CUT_SAMPLING))
    engine.take_metrics()
    responses, is_open, num_interrupted = OpenResponses(), list(range(len(CUT))), 0.0
    samples: dict[int, list[Sample]] = {}
    while is_open:
        sampling = replace(CUT_SAMPLING, num_complete=2)
        program = responses.program(CUT[is_open], sampling, interrupt=engine.interrupt)
        answered = engine.run(program)
        for number, index in enumerate(answered.prompts.prompt_index_P.tolist()):
            samples[index] = answered.samples[2 * number : 2 * number + 2]
            is_open.remove(index)
        assert stop(engine) == 0
        engine.continue_generation()
        interrupted = responses.metrics()["rollout/interrupted_tokens"]
        assert isinstance(interrupted, Sum)
        num_interrupted += interrupted.value
    assert num_interrupted > 0
    assert engine.take_metrics()["rollout/retried_requests"] == Sum(0)
    assert {sample.finish_reason for sample in uncut} == {"length"}
    for index, group in samples.items():
        assert_samples(group, uncut[2 * index : 2 * index + 2], atol=1e-4)
