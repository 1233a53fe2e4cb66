from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.batch import PromptBatch
from hybridrl.errors import EngineError
from hybridrl.metrics import check_declared
from hybridrl.sampler import Sample, Sampler, SamplingParams
from hybridrl.workers.rollout.embedded import prefill
from hybridrl.workers.rollout.single_turn import single_turn
from tests.tiny_models import TRAINED, Family, make_tiny_model
from tests.workers.rollout.engines import (
    assert_samples,
    greedy_of_hugging_face,
    load,
    make_prompts,
    prompt_batch,
    ready_engine,
    sampling_params,
    scoring_request,
    tokens_of,
)

LENGTHS = (1, 7, 3, 12, 2)


def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def rescore(
    model: PreTrainedModel, prompts: PromptBatch, responses: list[Sample], sampling: SamplingParams
) -> list[torch.Tensor]:
    """Log-probs of the responses, one row at a time through transformers' own forward pass."""
    temperature = sampling.temperature or 1.0
    scores = []
    for place, response in enumerate(responses):
        prompt = prompts.token_ids_PL.unbind()[place // sampling.num_responses_per_prompt]
        row = torch.cat([prompt, response.token_ids])
        with torch.no_grad():
            logits = model(row[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        scores.append(logprobs.gather(1, response.token_ids[:, None])[:, 0])
    return scores


@pytest.mark.parametrize(
    ("family", "tie_embeddings"),
    [
        pytest.param(family, tie, marks=[pytest.mark.nightly] * (tie is (place % 2 == 0)))
        for place, family in enumerate(TRAINED)
        for tie in (True, False)
    ],
)
def test_logprobs_are_those_of_hugging_face_whatever_the_slots(
    family: Family, tie_embeddings: bool, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    folder = make_tiny_model(tmp_path, family, tie_embeddings=tie_embeddings)
    prompts, plain = make_prompts(LENGTHS), plain_model(folder)
    sampling = sampling_params(group=2, temperature=0.7, stop=(5, 9), tokens=10)
    for num_slots in (1, 4, 32):
        responses = ready_engine(folder, num_slots=num_slots).run(single_turn(prompts, sampling))
        assert len(responses) == len(LENGTHS) * 2
        expected = rescore(plain, prompts, responses, sampling)
        for response, scores in zip(responses, expected, strict=True):
            torch.testing.assert_close(response.logprobs, scores, atol=1e-4, rtol=0)
        apart = [(r.logprobs - s).abs().max() for r, s in zip(responses, expected, strict=True)]
        record_property("embedded", float(max(apart)))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_tokens_that_are_there_are_scored_while_others_are_sampled(
    family: Family, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family)
    prompts, sampling = make_prompts(LENGTHS), sampling_params(group=1, temperature=0.7)
    engine = ready_engine(folder, num_slots=2)
    samples = engine.run(single_turn(prompts, sampling))

    async def both(sampler: Sampler) -> tuple[list[Sample], ...]:
        scored = [
            sampler.answer(scoring_request(prompt, sample, num_likeliest=3))
            for prompt, sample in zip(prompts.token_ids_PL.unbind(), samples, strict=True)
        ]
        return tuple(await asyncio.gather(single_turn(prompts, sampling)(sampler), *scored))

    again, *scored = engine.run(both)
    assert tokens_of(again) == tokens_of(samples)
    expected = rescore(plain_model(folder), prompts, samples, sampling)
    for sample, (score,), logprobs in zip(samples, scored, expected, strict=True):
        assert torch.equal(score.token_ids, sample.token_ids)
        assert score.teacher_JL is not None
        own_L, top_KL, ids_KL = score.teacher_JL.split([1, 3, 3])
        torch.testing.assert_close(own_L[0], logprobs, atol=1e-4, rtol=0)
        assert (top_KL.diff(dim=0) <= 0).all()
        assert (own_L <= top_KL[:1]).all()
        is_best_L = ids_KL[0] == sample.token_ids
        assert torch.equal(own_L[0, is_best_L], top_KL[0, is_best_L])


def test_greedy_takes_the_best_tokens_of_hugging_face(tiny_model: Path) -> None:
    prompts = make_prompts(LENGTHS)
    sampling = sampling_params(temperature=0.0, group=1, tokens=12)
    responses = ready_engine(tiny_model).run(single_turn(prompts, sampling))
    assert_samples(responses, greedy_of_hugging_face(tiny_model, prompts, num_tokens=12))


def test_tokens_do_not_depend_on_slots_order_neighbours_or_group_size(tiny_model: Path) -> None:
    prompts, sampling = make_prompts(LENGTHS), sampling_params(stop=(5,))
    expected = tokens_of(ready_engine(tiny_model, num_slots=16).run(single_turn(prompts, sampling)))
    assert len({tuple(tokens) for tokens in expected}) > 10  # siblings differ

    few_slots = ready_engine(tiny_model, num_slots=2)
    assert tokens_of(few_slots.run(single_turn(prompts, sampling))) == expected

    order = [3, 0, 4, 2, 1]
    permuted = tokens_of(few_slots.run(single_turn(prompts[torch.tensor(order)], sampling)))
    for place, prompt in enumerate(order):
        assert permuted[3 * place : 3 * place + 3] == expected[3 * prompt : 3 * prompt + 3]

    alone = few_slots.run(single_turn(prompts[1:2], sampling_params(group=2, stop=(5,))))
    assert tokens_of(alone) == expected[3:5]
    seeded = prompt_batch(prompts.token_ids_PL.unbind(), [1, 2, 3, 4, 5])
    assert tokens_of(few_slots.run(single_turn(seeded, sampling))) != expected


def test_prompts_prefilled_in_several_passes_give_the_same_tokens(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, sampling = make_prompts(LENGTHS), sampling_params()
    engine = ready_engine(tiny_model, num_slots=4)
    expected = tokens_of(engine.run(single_turn(prompts, sampling)))
    assert engine.last_stats is not None
    assert engine.last_stats.num_prefill_passes == 1
    monkeypatch.setattr(prefill, "_MAX_PASS_TOKENS", 8)  # less than two of the prompts alone
    assert tokens_of(engine.run(single_turn(prompts, sampling))) == expected
    assert engine.last_stats.num_prefill_passes == 5


def test_a_response_ends_with_the_first_stop_token_or_is_truncated(tiny_model: Path) -> None:
    stop = tuple(range(0, 64, 5))
    responses = ready_engine(tiny_model, num_slots=3).run(
        single_turn(make_prompts(LENGTHS), sampling_params(group=8, stop=stop))
    )
    for tokens, response in zip(tokens_of(responses), responses, strict=True):
        assert not set(tokens[:-1]) & set(stop)
        assert response.is_truncated == (tokens[-1] not in stop)
        assert len(tokens) == 8 or not response.is_truncated
        assert len(response.logprobs) == len(tokens)
    assert {response.is_truncated for response in responses} == {True, False}


def test_a_stop_token_at_the_very_limit_is_not_a_truncation(tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4,))
    greedy = sampling_params(group=1, temperature=0.0, tokens=2)
    [free] = engine.run(single_turn(prompts, greedy))
    *others, last = free.token_ids.tolist()
    assert last not in others
    [again] = engine.run(single_turn(prompts, replace(greedy, stop_token_ids=(last,))))
    assert tokens_of([again]) == tokens_of([free])
    assert (free.is_truncated, again.is_truncated) == (True, False)


def test_a_response_is_cut_where_the_context_ends(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, max_context_tokens=10)
    responses = engine.run(single_turn(make_prompts((9, 4)), sampling_params(group=1, tokens=100)))
    assert [len(response.token_ids) for response in responses] == [1, 6]
    assert all(response.is_truncated for response in responses)


def test_a_group_prefills_its_prompt_once_and_slots_are_refilled(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=4)
    engine.run(single_turn(make_prompts((5, 6)), sampling_params(group=6, tokens=8)))
    stats = engine.last_stats
    assert stats is not None
    assert stats.num_prefill_tokens == 11
    assert stats.num_decode_steps == 3 * 8  # 12 responses of equal length in 4 slots
    assert stats.num_slots_used == 4 * stats.num_decode_steps


@pytest.mark.shows("4.20")
def test_metrics_of_sampling_add_up_over_calls_and_are_taken_once(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=4)
    for _ in range(2):
        engine.run(single_turn(make_prompts((5,)), sampling_params(group=2, tokens=8)))
    metrics = engine.take_metrics()
    check_declared(metrics)
    assert metrics["rollout/decode_steps"].value == 16
    assert metrics["rollout/slot_occupancy"].value == 0.5
    assert engine.take_metrics() == {}


def test_top_k_of_one_is_greedy_with_the_log_probs_of_sampling(tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts(LENGTHS)
    responses = engine.run(single_turn(prompts, sampling_params(top_k=1)))
    greedy = engine.run(single_turn(prompts, sampling_params(temperature=0.0)))
    assert_samples(responses, greedy, atol=1e-5)


def test_bfloat16_weights_sample_with_float32_logprobs(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, dtype="bfloat16")
    prompts, sampling = make_prompts(LENGTHS), sampling_params()
    responses = engine.run(single_turn(prompts, sampling))
    expected = rescore(plain_model(tiny_model), prompts, responses, sampling)
    for response, scores in zip(responses, expected, strict=True):
        assert response.logprobs.dtype == torch.float32
        torch.testing.assert_close(response.logprobs, scores, atol=0.3, rtol=0)
    parameter = torch.ones((), requires_grad=True)
    loss = (parameter * responses[0].logprobs).sum()  # a loss would refuse inference tensors
    assert torch.autograd.grad(loss, parameter)[0].item() == responses[0].logprobs.sum().item()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((3, 0), "is empty(.|\n)*prompt 1 of"),
        ((3, 4, 32), "has 32 tokens, and the engine's context of 32 .* 31(.|\n)*prompt 2 of"),
    ],
)
def test_a_prompt_without_tokens_or_beyond_context_or_vocabulary_is_named(
    lengths: tuple[int, ...], message: str, tiny_model: Path
) -> None:
    engine = ready_engine(tiny_model)
    with pytest.raises(EngineError, match=message):
        engine.run(single_turn(make_prompts(lengths), sampling_params()))
    with pytest.raises(EngineError, match="span 1 to 64, and the model knows 0 to 63"):
        engine.run(single_turn(prompt_batch([torch.tensor([1, 64])], [0]), sampling_params()))
    assert engine.run(single_turn(make_prompts((3, 31)), sampling_params()))


def test_nan_while_decoding_is_an_error_and_leaves_none_behind(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_embeddings=False)
    engine, prompts = ready_engine(folder), make_prompts((3, 12))
    swapped = prompts[torch.tensor([1, 0])]  # its short rows lie where long ones left NaN
    expected = tokens_of(engine.run(single_turn(swapped, sampling_params())))
    name = "model.embed_tokens.weight"
    healthy = engine._model.get_parameter(name).clone()
    sick = torch.full_like(healthy, float("nan"))
    seen = prompts.token_ids_PL.values()
    sick[seen] = healthy[seen]  # the prompts pass, the first other token does not
    for _ in range(2):
        load(engine, [(name, sick)])
        with pytest.raises(EngineError, match="not finite"):
            engine.run(single_turn(prompts, sampling_params()))
        load(engine, [(name, healthy)])
        assert tokens_of(engine.run(single_turn(swapped, sampling_params()))) == expected
