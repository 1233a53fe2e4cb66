from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.errors import DriftError, EngineError, PhaseError
from hybridrl.models.adapter_names import adapter_shapes, matrix_names
from hybridrl.sampler import Program, RequestParams, Sample, Sampler, SampleRequest
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.memory import base_shapes
from hybridrl.workers.rollout.single_turn import single_turn
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import (
    assert_samples,
    load,
    make_prompts,
    ready_engine,
    sampling_params,
    send_weights,
    tokens_of,
    unsynced_engine,
)
from tests.workers.train.lora_engines import LORA, with_lora

PROMPTS = make_prompts((4, 9, 5))
SAMPLING = sampling_params(group=2, tokens=6)
TURN = RequestParams(max_new_tokens=5, temperature=1.0)
TARGETS = with_lora(target_modules=("q_proj", "down_proj"))
Q_PROJ = "model.layers.0.self_attn.q_proj"


def lora_engine(folder: Path, *, dtype: str = "float32") -> HFRolloutEngine:
    engine = unsynced_engine(folder, dtype=dtype, lora=TARGETS)
    send_weights(engine, folder)
    return engine


def make_adapter(engine: HFRolloutEngine, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (32, 32), "down_proj": (32, 64)}
    adapter = {}
    for memory in engine.weight_memory():
        if ".lora_" in memory.name:
            outputs, inputs = next(size for name, size in sizes.items() if name in memory.name)
            shape = (LORA.rank, inputs) if ".lora_A." in memory.name else (outputs, LORA.rank)
            adapter[memory.name] = torch.randn(shape, generator=generator) * 0.2
    return adapter


def merged_engine(folder: Path, adapter: dict[str, Tensor]) -> HFRolloutEngine:
    engine = ready_engine(folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        a, b = matrix_names(name.removesuffix(".weight"))
        if a in adapter:
            weights[name] = weights[name] + LORA.scaling * adapter[b] @ adapter[a]
    load(engine, list(weights.items()))
    return engine


@pytest.mark.shows("1.11")
def test_an_adapter_samples_what_merged_weights_sample(tiny_model: Path) -> None:
    engine = lora_engine(tiny_model)
    plain = tokens_of(ready_engine(tiny_model).run(single_turn(PROMPTS, SAMPLING)))
    for seed in range(2):
        adapter = make_adapter(engine, seed=seed)
        engine.unload_adapter()
        engine.load_adapter(adapter, version=0)
        ours = engine.run(single_turn(PROMPTS, SAMPLING))
        merged = merged_engine(tiny_model, adapter).run(single_turn(PROMPTS, SAMPLING))
        assert_samples(ours, merged)
        assert tokens_of(ours) != plain


@pytest.mark.shows("1.11")
def test_nothing_is_sampled_without_an_adapter(tiny_model: Path) -> None:
    engine = lora_engine(tiny_model)
    adapter = make_adapter(engine)

    def refused() -> None:
        with pytest.raises(EngineError, match=r"no adapter is loaded, and the frozen model alone"):
            engine.run(single_turn(PROMPTS, SAMPLING))

    refused()
    engine.unload_adapter()  # tolerated: there is none
    for _ in range(2):
        engine.load_adapter(adapter, version=0)
        assert engine.run(single_turn(PROMPTS, SAMPLING))
        engine.unload_adapter()
        engine.unload_adapter()
        refused()
    engine.load_adapter(adapter, version=0)
    for backup, survives in ((frozenset(engine.checksums()), True), (frozenset(), False)):
        engine.release(MemoryTag.WEIGHTS, backup=backup)
        engine.resume(MemoryTag.WEIGHTS)
        if survives:
            assert engine.run(single_turn(PROMPTS, SAMPLING))
    refused()
    engine.release(MemoryTag.WEIGHTS)
    with pytest.raises(PhaseError, match="load_adapter was refused: WEIGHTS is released"):
        engine.load_adapter(adapter, version=0)
    engine.restart()
    send_weights(engine, tiny_model)
    refused()


@pytest.mark.shows("1.9", "1.12")
def test_an_adapter_is_loaded_completely_or_refused_by_name(tiny_model: Path) -> None:
    engine = lora_engine(tiny_model)
    good = make_adapter(engine)
    engine.load_adapter(good, version=0)
    sums = engine.checksums()
    first = next(iter(good))
    others = {name: tensor for name, tensor in good.items() if name != first}
    bad = {
        "lacks .* of 4 adapted layers": {},
        "has too much: model.embed_tokens.weight": good
        | {"model.embed_tokens.weight": torch.zeros(64, 32)},
        "lacks .*, of 4 adapted layers": {
            name.replace("layers", "blocks"): tensor for name, tensor in good.items()
        },
        f"lacks {first}": others,
        "has too much: .*v_proj": good
        | {first.replace("q_proj", "v_proj"): torch.zeros(LORA.rank, 32)},
        r"with shape \[2, 32\].*same lora.rank": good | {first: torch.zeros(2, 32)},
    }
    for words, adapter in bad.items():
        with pytest.raises(EngineError, match=words):
            engine.load_adapter(adapter, version=0)
    assert engine.checksums() == sums
    engine.load_adapter(good, version=0)


def test_an_engine_built_without_adapters_takes_none(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    with pytest.raises(EngineError, match=r"built without.*lora\.sync=adapter"):
        engine.load_adapter({"x.lora_A.weight": torch.zeros(1)}, version=0)
    engine.unload_adapter()
    assert engine.run(single_turn(PROMPTS, SAMPLING))


def test_base_weights_keep_their_names_and_adapters_are_counted(tiny_model: Path) -> None:
    engine, plain = lora_engine(tiny_model), ready_engine(tiny_model)
    adapter = make_adapter(engine)
    names = [memory.name for memory in engine.weight_memory()]
    assert names == [*(memory.name for memory in plain.weight_memory()), *adapter]
    assert not any(memory.is_buffer for memory in engine.weight_memory() if "lora" in memory.name)
    more = engine.resident_bytes(MemoryTag.WEIGHTS) - plain.resident_bytes(MemoryTag.WEIGHTS)
    assert more == sum(tensor.nbytes for tensor in adapter.values())
    with pytest.raises(EngineError, match="has no weight"):
        load(engine, list(adapter.items()))


def test_a_bfloat16_engine_keeps_updates_that_merging_would_lose(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    engine = lora_engine(folder, dtype="bfloat16")
    small = {name: tensor * 0.02 for name, tensor in make_adapter(engine).items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in small.items()}
    engine.load_adapter(zeros, version=0)
    before = engine.run(single_turn(PROMPTS, replace(SAMPLING, temperature=0.0)))
    engine.load_adapter(small, version=0)
    after = engine.run(single_turn(PROMPTS, replace(SAMPLING, temperature=0.0)))
    weight = load_file(folder / "model.safetensors")[f"{Q_PROJ}.weight"].bfloat16()
    a, b = (small[name] for name in matrix_names(Q_PROJ))
    swallowed = (weight + LORA.scaling * b @ a).bfloat16() == weight
    assert swallowed.float().mean() > 0.5
    assert any(
        not torch.equal(one.logprobs, other.logprobs)
        for one, other in zip(before, after, strict=True)
    )


async def two_turns(sampler: Sampler, context: list[int], version: int | None) -> list[Sample]:
    turns = []
    for turn in range(2):
        asked = torch.tensor(context)
        request = SampleRequest(asked, TURN, [len(context)], is_turn=True, version=version)
        turns += await sampler.answer(request)
        context = [*context, *turns[turn].token_ids.tolist(), 7]
    return turns


def test_requests_end_with_the_adapter_that_they_began_with_while_another_one_comes(
    tiny_model: Path,
) -> None:
    """Two adapters decode in the same steps, and neither reads keys or values of the other."""
    engine = lora_engine(tiny_model)
    adapters = [make_adapter(engine, seed=seed) for seed in range(3)]
    contexts = [prompt.tolist() for prompt in PROMPTS.token_ids_PL.unbind()]

    def alone(version: int) -> list[list[Sample]]:
        other = lora_engine(tiny_model)
        other.load_adapter(adapters[version], version=version)

        async def program(sampler: Sampler) -> list[list[Sample]]:
            return await asyncio.gather(*(two_turns(sampler, each, None) for each in contexts))

        return other.run(program)

    async def program(sampler: Sampler) -> list[list[list[Sample]]]:
        open_ones = [asyncio.ensure_future(two_turns(sampler, each, 0)) for each in contexts]
        await sampler.sample(contexts[0], replace(TURN, max_new_tokens=2), key=0)  # they decode
        engine.load_adapter(adapters[1], version=1)
        new_ones = [two_turns(sampler, each, 1) for each in contexts]
        answers = [await asyncio.gather(*open_ones), await asyncio.gather(*new_ones)]
        engine.unload_adapter(kept={1})
        with pytest.raises(DriftError, match=r"adapter of version 0, and .* has those of \[1\]"):
            await two_turns(sampler, contexts[0], 0)
        engine.load_adapter(adapters[2], version=2)
        both = [two_turns(sampler, each, version) for version in (1, 2) for each in contexts]
        turns = await asyncio.gather(*both)
        return [*answers, turns[: len(contexts)], turns[len(contexts) :]]

    engine.load_adapter(adapters[0], version=0)
    for version, answers in zip((0, 1, 1, 2), engine.run(program), strict=True):
        for ours, theirs in zip(answers, alone(version), strict=True):
            assert_samples(ours, theirs)
            assert {sample.weight_version for sample in ours} == {version}
    assert tokens_of(alone(0)[0]) != tokens_of(alone(1)[0]) != tokens_of(alone(2)[0])


def test_a_later_turn_under_another_adapter_reads_no_keys_and_values_of_the_first(
    tiny_model: Path,
) -> None:
    engine = lora_engine(tiny_model)
    for version in range(2):
        engine.load_adapter(make_adapter(engine, seed=version), version=version)

    async def turn(sampler: Sampler, context: list[int], version: int | None) -> Sample:
        request = SampleRequest(torch.tensor(context), TURN, [3], is_turn=True, version=version)
        (sample,) = await sampler.answer(request)
        return sample

    async def program(sampler: Sampler) -> tuple[list[int], list[Sample]]:
        context = list(range(1, 10))
        context += [*(await turn(sampler, context, 0)).token_ids.tolist(), 7]
        return context, [await turn(sampler, context, version) for version in (1, 0)]

    context, answers = engine.run(program)
    for version, ours in zip((1, 0), answers, strict=True):
        other = lora_engine(tiny_model)
        other.load_adapter(make_adapter(other, seed=version), version=version)
        theirs = other.run(lambda sampler: turn(sampler, context, None))
        assert_samples([ours], [theirs])


def test_a_response_that_nobody_waits_for_decodes_on_when_its_adapter_is_unloaded(
    tiny_model: Path,
) -> None:
    """A caller that goes away does not reach a process: others' responses must not fail."""
    engine = lora_engine(tiny_model)
    engine.load_adapter(make_adapter(engine, seed=0), version=0)

    async def program(sampler: Sampler) -> list[list[Sample]]:
        context = PROMPTS.token_ids_PL.unbind()[0]
        left = SampleRequest(context, replace(TURN, max_new_tokens=20), [1], version=0)
        others = asyncio.ensure_future(sampler.answer(left))
        await sampler.answer(replace(left, params=replace(TURN, max_new_tokens=2)))
        assert not others.done()
        engine.unload_adapter()
        engine.load_adapter(make_adapter(engine, seed=1), version=1)
        return [await sampler.answer(replace(left, version=1)), await others]

    new, old = engine.run(program)
    assert [new[0].weight_version, old[0].weight_version] == [1, 0]


def test_a_program_that_runs_on_says_what_it_counted_since_it_was_asked(tiny_model: Path) -> None:
    engine = lora_engine(tiny_model)
    engine.load_adapter(make_adapter(engine), version=0)
    told = []

    async def program(sampler: Sampler) -> None:
        for num_tokens in (2, 5):
            await sampler.sample([1, 2, 3], replace(TURN, max_new_tokens=num_tokens), key=0)
            told.append(engine.take_metrics())

    begin = time.perf_counter()
    engine.run(program)
    told.append(engine.take_metrics())
    passed_s = time.perf_counter() - begin
    assert [metrics["rollout/decode_steps"].value for metrics in told] == [2, 5, 0]
    seconds = [metrics["time/sample_s"].value for metrics in told]
    assert min(seconds) > 0
    assert sum(seconds) <= passed_s  # none is counted twice


def test_recurrent_layers_apply_to_each_context_the_adapter_of_its_request(tmp_path: Path) -> None:
    """They pad the rows of a pass: places of tokens in it are not those that they see."""
    folder = make_tiny_model(tmp_path, "qwen3_5_text")
    lora = with_lora(target_modules=("in_proj_qkv", "out_proj"))
    engine, *others = engines = [unsynced_engine(folder, lora=lora) for _ in range(3)]
    for each in engines:
        send_weights(each, folder)
    generator = torch.Generator().manual_seed(0)
    for version, other in enumerate(others):
        shapes = adapter_shapes(base_shapes(folder), lora)
        adapter = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}
        engine.load_adapter(adapter, version=version)
        other.load_adapter(adapter, version=version)
    contexts = [prompt.tolist() for prompt in PROMPTS.token_ids_PL.unbind()]

    def asking(*versions: int) -> Program[list[list[Sample]]]:
        async def program(sampler: Sampler) -> list[list[Sample]]:
            asked = [two_turns(sampler, each, v) for v in versions for each in contexts]
            return await asyncio.gather(*asked)

        return program

    both = engine.run(asking(0, 1))
    apart = [answer for v, other in enumerate(others) for answer in other.run(asking(v))]
    assert [tokens_of(each) for each in both] == [tokens_of(each) for each in apart]
    assert tokens_of(apart[0]) != tokens_of(apart[len(contexts)])
