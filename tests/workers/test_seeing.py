"""Models that see: what engines compute for rows with images, beside transformers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hybridrl.batch import TrainBatch
from hybridrl.config.model import LoraConfig
from hybridrl.errors import RequestError
from hybridrl.images import Images
from hybridrl.models.load import WeightFiles
from hybridrl.sampler import RequestParams, Sample, Sampler
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.train.context_parallel import start_context_parallel
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.ranks import run_ranks
from tests.seeing import KINDS, Kind, by_day
from tests.workers.rollout.engines import load as load_weights
from tests.workers.rollout.engines import unsynced_engine
from tests.workers.seeing_rows import (
    all_plain_logprobs,
    draw_image,
    draw_rows,
    gradients,
    load_plain,
    lora_of,
    prompt_with,
    rollouts_of,
    seeing_model,
)
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    assert_same_weights,
    fsdp2_of,
    load,
    rows_of,
    save,
    to_rollouts,
    update,
    weights_of,
)
from tests.workers.train.lora_engines import adapter_of, build_lora, randomize

Record = Callable[[str, object], None]


def in_turns(*options: object) -> list[object]:
    """Return each kind with each option, of which one is tested by day."""
    return [
        pytest.param(kind, option, marks=[pytest.mark.nightly] * (number % len(options) != place))
        for number, kind in enumerate(KINDS)
        for place, option in enumerate(options)
    ]


def build(
    folder: Path, *, freezes: bool, max_tokens: int = 10_000, num_sharing: int = 1
) -> PolicyEngine:
    return PolicyEngine(
        FSDP2Backend(
            folder,
            config=replace(ACTOR, max_tokens_per_microbatch=max_tokens),
            model_config=replace(MODEL, freeze_vision=freezes),
            num_total_steps=10,
            device=CPU,
            context=start_context_parallel(num_sharing, CPU, timeout_s=60.0),
        )
    )


@pytest.mark.parametrize(("kind", "max_tokens"), in_turns(10_000, 20))
def test_packed_rows_with_images_equal_padded_rows_of_transformers(
    kind: Kind, max_tokens: int, tmp_path: Path, record_property: Record
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    batch, images = draw_rows(settings)
    plain = load_plain(folder)
    expected_S = all_plain_logprobs(plain, batch, images, settings)
    engine = build(folder, freezes=False, max_tokens=max_tokens)
    own_S, weight_S = _backward(engine, batch)
    torch.testing.assert_close(own_S, expected_S.detach(), atol=1e-5, rtol=0)
    record_property("packed", float((own_S - expected_S).detach().abs().max()))
    (expected_S * weight_S).sum().backward()
    own = gradients(fsdp2_of(engine).model.hf, is_plain=False)
    wanted = gradients(plain, is_plain=True)
    assert own.keys() == wanted.keys()
    apart = max(float((own[name] - grad).abs().max()) for name, grad in wanted.items())
    record_property("gradient", apart / max(float(g.abs().max()) for g in wanted.values()))
    for name, grad in wanted.items():
        torch.testing.assert_close(
            own[name], grad, atol=2e-5 * float(grad.abs().max() + 1), rtol=1e-4, msg=name
        )


def _learn_on_a_rank(
    rank: int, folder: Path, freezes: bool, batch: TrainBatch, shares_tokens: bool
) -> dict[str, Tensor]:
    engine = build(folder, freezes=freezes, max_tokens=20, num_sharing=1 + shares_tokens)
    # The second rank has the rows without images, and fewer micro-batches.
    for rows in ([0, 1, 3, 4, 6], [2, 5]), ([2, 5], [0, 1, 3, 4, 6]):
        update(engine, batch if shares_tokens else rows_of(batch, rows[rank]))
    return weights_of(engine)


CUTS = [
    (kind, freezes, shares_tokens)
    for kind in KINDS
    for freezes in (False, True)
    for shares_tokens in (False, True)
    if not (shares_tokens and kind.startswith("qwen3_5"))  # a state needs all tokens of a row
]
CUTS_BY_DAY = (
    ("qwen2_5_vl", True, True),
    ("qwen3_vl_moe", False, True),
    ("qwen3_5", False, False),
)


@pytest.mark.parametrize(
    ("kind", "freezes", "shares_tokens"),
    [pytest.param(*c, marks=() if c in CUTS_BY_DAY else pytest.mark.nightly) for c in CUTS],
)
def test_two_ranks_learn_as_one_and_a_frozen_tower_stays(
    kind: Kind, freezes: bool, shares_tokens: bool, tmp_path: Path
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    batch, _ = draw_rows(settings)
    alone = build(folder, freezes=freezes)
    before = weights_of(alone)
    for _ in range(2):
        update(alone, batch)
    after = weights_of(alone)
    for weights in run_ranks(2, _learn_on_a_rank, folder, freezes, batch, shares_tokens):
        for name, weight in after.items():
            torch.testing.assert_close(weights[name], weight, atol=5e-5, rtol=1e-4, msg=name)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    towers = {name for name in after if name.startswith("visual.")}
    assert after.keys() - towers <= changed
    assert not (towers & changed) if freezes else len(towers & changed) > len(towers) // 2


def embedded(folder: Path, **options: Any) -> HFRolloutEngine:
    files = WeightFiles(folder)
    engine = unsynced_engine(folder, **{"max_context_tokens": 96} | options)
    names = sorted(files.names)
    load_weights(engine, [(n, files.read(n, shape=torch.Size(files.shape_of(n)))) for n in names])
    engine.finish_update(version=0)
    return engine


@pytest.mark.parametrize("kind", by_day("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"))
def test_the_embedded_engine_samples_what_the_trainer_scores(
    kind: Kind, tmp_path: Path, record_property: Record
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    one, tall, small, other = (
        draw_image(settings, *size, seed=seed)
        for seed, size in enumerate([(2, 3), (4, 2), (1, 1), (1, 1)], 7)
    )
    params = RequestParams(max_new_tokens=9, temperature=1.0)
    answered: list[tuple[list[int], Images, Sample]] = []

    async def program(sampler: Sampler) -> None:
        for images in ((one, tall), (), (small,), (other,), (one, small, tall)):
            context = prompt_with(images, settings)
            group = await sampler.sample_group(context, params, keys=(1, 2, 3), images=images)
            answered.extend((context, images, sample) for sample in group)
        seen: Images = (small,)
        context = prompt_with(seen, settings)
        for turn in range(3):  # later turns begin with what a slot holds, and bring an image more
            sample = await sampler.sample(context, params, key=turn, images=seen)
            answered.append((context, seen, sample))
            context = [*context, *sample.token_ids.tolist(), *prompt_with((one,), settings)]
            seen = (*seen, one)

    engine = embedded(folder, num_slots=4)
    engine.run(program)
    assert engine.last_stats is not None
    assert engine.last_stats.num_prefill_tokens < engine.last_stats.num_context_tokens
    batch = rollouts_of(answered)
    scores = build(folder, freezes=True).compute_logprobs(batch, temperature=1.0)
    torch.testing.assert_close(
        scores.logprobs_BL.values(), batch.sampler_logprobs_BL.values(), atol=1e-5, rtol=0
    )
    apart_N = scores.logprobs_BL.values() - batch.sampler_logprobs_BL.values()
    record_property("embedded", float(apart_N.abs().max()))
    first, second = (answered[n][2].logprobs for n in (6, 9))  # equal tokens, other pixels
    assert float((first[0] - second[0]).abs()) > 1e-3


def test_placeholders_that_are_not_those_of_the_images_are_refused(tmp_path: Path) -> None:
    folder, settings = seeing_model(tmp_path / "model", "qwen2_5_vl")
    image = draw_image(settings, 2, 2, seed=1)
    whole = prompt_with([image], settings)
    engine = embedded(folder)
    params = RequestParams(max_new_tokens=2, temperature=1.0)

    async def program(sampler: Sampler) -> list[str]:
        texts = []
        for context, images in ((whole[:4], (image,)), (whole, (image, image))):
            with pytest.raises(RequestError) as refused:
                await sampler.sample(context, params, key=0, images=images)
            texts.append(str(refused.value))
        await sampler.sample(whole, params, key=0, images=(image,))
        return texts

    first, second = engine.run(program)
    assert "image 0 of 1 takes 4 placeholders" in first
    assert "image 1 of 2 takes 4 placeholders" in second


@pytest.mark.parametrize(("kind", "freezes"), in_turns(False, True))
def test_adapters_equal_those_of_peft_on_padded_rows_of_transformers(
    kind: Kind, freezes: bool, tmp_path: Path, record_property: Record
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    batch, images = draw_rows(settings)
    engine = build_lora(folder, freezes=freezes, lora=lora_of(kind))
    randomize(engine)
    engine.export_adapter(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(
        load_plain(folder), tmp_path / "adapter", is_trainable=True
    )
    expected_S = all_plain_logprobs(plain, batch, images, settings)
    own_S, weight_S = _backward(engine, batch)
    torch.testing.assert_close(own_S, expected_S.detach(), atol=1e-5, rtol=0)
    record_property("lora", float((own_S - expected_S).detach().abs().max()))
    bare_S = all_plain_logprobs(load_plain(folder), batch, images, settings)
    assert float((bare_S - expected_S).detach().abs().max()) > 0.1
    (expected_S * weight_S).sum().backward()
    own = gradients(fsdp2_of(engine).model.hf, is_plain=False)
    wanted = gradients(plain.base_model.model, is_plain=True)
    assert own.keys() == wanted.keys()
    linear = {n for n, m in load_plain(folder).named_modules() if isinstance(m, torch.nn.Linear)}
    adapted = {n for n in linear if "visual" in n or n.rpartition(".")[2] in lora_of(kind).modules}
    adapted = {n for n in adapted if not (freezes and "visual" in n)}
    assert len(own) == 2 * len(adapted)
    for name, grad in wanted.items():
        torch.testing.assert_close(
            own[name], grad, atol=1e-5 * float(grad.abs().max() + 1), rtol=1e-4, msg=name
        )


def _backward(engine: PolicyEngine, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens, and the weights of the sum whose gradient is there then."""
    backend = fsdp2_of(engine)
    is_response_N = batch.response_mask_BL.values()
    place_N = is_response_N.cumsum(0) - 1
    logprobs_S = torch.empty(int(is_response_N.sum()))
    weight_S = torch.randn(len(logprobs_S), generator=torch.Generator().manual_seed(1))
    for microbatch in backend.microbatches(batch):
        own_S, _ = backend.model(microbatch.tokens, 1.0)
        place_S = place_N[microbatch.token_index_S]
        logprobs_S[place_S] = own_S.detach()
        (own_S * weight_S[place_S]).sum().backward()
    return logprobs_S, weight_S


def _adapt_on_a_rank(
    rank: int, folder: Path, lora: LoraConfig, batch: TrainBatch
) -> dict[str, Tensor]:
    config = replace(ACTOR, max_tokens_per_microbatch=20)
    engine = build_lora(folder, freezes=False, lora=lora, config=config)
    for rows in ([0, 1, 3, 4, 6], [2, 5]), ([2, 5], [0, 1, 3, 4, 6]):
        update(engine, rows_of(batch, rows[rank]))
    return adapter_of(engine)


@pytest.mark.parametrize("kind", by_day("qwen3_vl_moe"))
def test_adapters_of_both_parts_learn_on_two_ranks_as_on_one_resume_and_are_merged(
    kind: Kind, tmp_path: Path
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    batch, images = draw_rows(settings)
    lora = lora_of(kind)
    engine = build_lora(folder, freezes=False, lora=lora)
    before = weights_of(engine)
    update(engine, batch)
    save(engine, tmp_path / "saved")
    again = build_lora(folder, freezes=False, lora=lora)
    load(again, tmp_path / "saved")
    for each in (engine, again):
        update(each, batch)
    adapter = adapter_of(engine)
    assert_same_weights(adapter_of(again), adapter)
    assert_same_weights(weights_of(engine), before)
    for of_rank in run_ranks(2, _adapt_on_a_rank, folder, lora, batch):
        for name, tensor in adapter.items():
            torch.testing.assert_close(of_rank[name], tensor, atol=2e-5, rtol=1e-4, msg=name)
    assert all(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name)
    engine.export_adapter(tmp_path / "adapter")
    lora = replace(lora, init_from=str(tmp_path / "adapter"))
    assert_same_weights(adapter_of(build_lora(folder, freezes=False, lora=lora)), adapter)
    engine.export_hf(tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(load_plain(folder), tmp_path / "adapter")
    one_S, other_S = (
        all_plain_logprobs(model, batch, images, settings).detach() for model in (merged, adapted)
    )
    torch.testing.assert_close(one_S, other_S, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", by_day("qwen2_5_vl", "qwen3_5_moe"))
def test_a_trained_tower_is_kept_in_checkpoints_and_exports(kind: Kind, tmp_path: Path) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    batch, images = draw_rows(settings)
    engine = build(folder, freezes=False)
    update(engine, batch)
    save(engine, tmp_path / "saved")
    again = build(folder, freezes=False)
    load(again, tmp_path / "saved")
    update(engine, batch)
    update(again, batch)
    for name, weight in weights_of(engine).items():
        assert torch.equal(weights_of(again)[name], weight), name
    engine.export_hf(tmp_path / "exported")
    scores = engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    expected_S = all_plain_logprobs(plain, batch, images, settings).detach()
    logprobs_S = scores.logprobs_BL.values()[batch.response_mask_BL.values()]
    torch.testing.assert_close(logprobs_S, expected_S, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("freezes", "as_tokens"), [(True, 1), (False, 4)])
def test_images_count_by_their_patches_where_the_tower_learns(
    freezes: bool, as_tokens: int, tmp_path: Path
) -> None:
    folder, settings = seeing_model(tmp_path / "model", "qwen2_5_vl")
    batch, _ = draw_rows(settings)
    engine = build(folder, freezes=freezes, max_tokens=90)
    work = []
    for microbatch in fsdp2_of(engine).microbatches(batch):
        seen = microbatch.tokens.seen
        assert seen is not None
        work.append(microbatch.num_tokens + (as_tokens - 1) * len(seen.place_I))
    assert max(work) <= 90
    assert len(work) == -(-sum(work) // 90)  # as few as hold all
