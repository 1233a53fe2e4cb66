from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError
from hybridrl.models.adapter_names import adapter_shapes
from hybridrl.sampler import Sample, Sampler, SampleRequest, SamplingParams
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.event_loop import ProgramCall
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.memory import base_shapes
from hybridrl.workers.rollout.sglang.sampling import Group, HttpSampler, ServedModel
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from hybridrl.workers.train.protocol import WeightSet
from tests.sglang.engines import sync, weights_of
from tests.sglang.lora_device import GREEDY, PROMPTS, ForgetfulEngine, ServedDevice
from tests.workers.device import WAYS, check_passes, largest_mismatch_nats
from tests.workers.rollout.engines import greedy_of_hugging_face, stop, tokens_of, unsynced_engine
from tests.workers.rollout.engines import load as load_base
from tests.workers.train.lora_engines import LORA, adapter_of, build_lora, randomize, with_lora

_CACHE = (MemoryTag.KV_CACHE.value, MemoryTag.CUDA_GRAPH.value)


def greedy_of_the_embedded_engine(device: ServedDevice, folder: Path) -> list[Sample]:
    lora = device.lora if device.lora.sends_adapters else None
    engine = unsynced_engine(folder, max_context_tokens=64, lora=lora)
    load_base(engine, list(device.trainer.full_weights()))
    if lora is not None:
        weights = dict(device.trainer.full_weights(WeightSet.ADAPTER))
        engine.load_adapter(weights, version=device.version)
    engine.finish_update(version=device.version)
    return engine.run(single_turn(PROMPTS, GREEDY))


@pytest.mark.shows("1.4", "5.3")
@pytest.mark.parametrize(("sync", "way"), [("adapter", "resend"), ("merged", "backup")])
def test_samples_with_an_adapter_apart_or_merged_are_the_trainers_in_three_cycles(
    request: pytest.FixtureRequest, served_model: Path, sync: str, way: str
) -> None:
    engine = request.getfixturevalue("lora_engine" if sync == "adapter" else "engine")
    lora = LORA if sync == "adapter" else with_lora(sync="merged")
    device = ServedDevice(engine, served_model, way, lora=lora)
    answers = []
    for version in range(3):
        assert device.mismatch_nats() < 1e-4
        greedy = device.sample(GREEDY)
        assert device.apart_nats(greedy, temperature=1.0) < 1e-4
        assert tokens_of(greedy) == tokens_of(greedy_of_the_embedded_engine(device, served_model))
        assert device.engine.version == version
        answers.append(tokens_of(greedy))
        device.train()
    assert answers[0] != answers[1] != answers[2]


@pytest.mark.shows("1.7", "1.8")
@pytest.mark.parametrize("way", WAYS)
def test_the_base_goes_before_the_first_adapter_and_not_again(
    lora_engine: ForgetfulEngine, served_model: Path, way: str
) -> None:
    device = ServedDevice(lora_engine, served_model, way)
    check_passes(device, way)
    assert device.mismatch_nats() < 1e-4


@pytest.mark.shows("1.15")
def test_a_resident_base_stays_while_cache_and_graphs_come_and_go(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    device = ServedDevice(lora_engine, served_model, "resident")
    device.sample()
    lora_engine.forget_journal()
    for _ in range(2):
        assert device.manager._life.states == (State.KV_ASLEEP,)
        device.train()
        device.sample()
    touched = [call for call in lora_engine.journal if call.startswith("re")]
    cycle = [f"{verb} {part}" for verb in ("resume", "release") for part in _CACHE]
    assert touched == cycle * 2


@pytest.mark.shows("1.5")
def test_the_ledger_prevents_garbage_after_a_bare_release(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    device = ServedDevice(lora_engine, served_model, "resend")
    device.sample()
    managed = device.manager._engines.managed
    assert managed is not None
    ledger = managed.ledger
    device.train()
    ledger.receive([spec.name for spec in device.trainer.weight_specs()])  # the guard is off
    assert device.mismatch_nats() > 0.1
    device.train()
    assert device.mismatch_nats() < 1e-4


@pytest.mark.shows("1.16")
@pytest.mark.nightly
def test_a_server_that_died_gets_base_and_adapter_first(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    """It dies as SGLang does without our check: of an adapter that lacks a matrix."""
    device = ServedDevice(lora_engine, served_model, "awake")
    device.sample()
    device.train()
    torn = adapter_of(device.trainer)
    torn = {name: tensor for name, tensor in torn.items() if "0.self_attn.q_proj" not in name}
    with pytest.raises(StageError), device.manager.rollout_phase():
        lora_engine.unload_adapter()
        lora_engine._adapter_shapes = {name: torn[name].shape for name in torn}  # no guard
        lora_engine.load_adapter(torn, version=device.version)
        with pytest.raises(EngineError, match=r"SGLang (was killed|ended)"):
            lora_engine.run(single_turn(PROMPTS, GREEDY))
    lora_engine._adapter_shapes = adapter_shapes(base_shapes(served_model), LORA)
    lora_engine.forget_journal()
    assert device.mismatch_nats() < 1e-4
    expected = {spec.name for part in WeightSet for spec in device.trainer.weight_specs(part)}
    assert set(lora_engine.received) == expected


@pytest.fixture
def loaded(lora_engine: ForgetfulEngine, served_model: Path) -> ForgetfulEngine:
    sync(lora_engine, weights_of(served_model), version=0)
    return lora_engine


@pytest.fixture(scope="module")
def adapter(served_model: Path) -> dict[str, Tensor]:
    trainer = build_lora(served_model)
    randomize(trainer)
    return adapter_of(trainer)


def load(
    engine: ForgetfulEngine, adapter: dict[str, Tensor], *, unloads_before: bool = True
) -> None:
    stop(engine)
    try:
        if unloads_before:
            engine.unload_adapter()
        engine.load_adapter(adapter, version=0)
    finally:
        engine.continue_generation()


def load_unchecked(engine: ForgetfulEngine, adapter: dict[str, Tensor]) -> None:
    """As an engine without our check would."""
    shapes, engine._adapter_shapes = (
        engine._adapter_shapes,
        {name: tuple(tensor.shape) for name, tensor in adapter.items()},
    )
    try:
        load(engine, adapter)
    finally:
        engine._adapter_shapes = shapes


def ask(engine: ForgetfulEngine, *, adapter: int | None = None) -> list[list[int]]:
    """Send the prompts as they are spelled, past the engine's own checks."""
    answers: list[list[int]] = []
    model = ServedModel(
        max_context_tokens=96,
        vocab_size=64,
        version=adapter or 0,
        names_adapter=adapter is not None,
    )
    sampler = HttpSampler(engine._server.client, model, ProgramCall(), timeout_s=60.0)
    for tokens in PROMPTS.token_ids_PL.unbind():
        ids: list[int] = tokens.tolist()
        request = SampleRequest(torch.tensor(ids), GREEDY.request_params(), [0])
        group = Group(request, tuple(ids), ids)
        items: list[dict[str, Any]] = engine._server.post("/generate", **sampler.group_body(group))
        answers += [item["output_ids"] for item in items]
    return answers


def of_the_frozen_model(folder: Path) -> list[list[int]]:
    return tokens_of(greedy_of_hugging_face(folder, PROMPTS, num_tokens=8))


@pytest.mark.shows("1.11")
def test_each_request_names_the_adapter(
    loaded: ForgetfulEngine, served_model: Path, adapter: dict[str, Tensor]
) -> None:
    load(loaded, adapter)
    frozen = of_the_frozen_model(served_model)
    assert ask(loaded) == frozen  # the guard is off, and nobody complains
    assert tokens_of(loaded.run(single_turn(PROMPTS, GREEDY))) == ask(loaded, adapter=0) != frozen
    with pytest.raises(EngineError, match="never been loaded: policy-9"):
        ask(loaded, adapter=9)


@pytest.mark.shows("1.12")
def test_an_adapter_that_matches_no_layer_is_refused(
    loaded: ForgetfulEngine, served_model: Path, adapter: dict[str, Tensor]
) -> None:
    elsewhere = {name.replace("layers", "blocks"): tensor for name, tensor in adapter.items()}
    load_unchecked(loaded, elsewhere)
    assert tokens_of(loaded.run(single_turn(PROMPTS, GREEDY))) == of_the_frozen_model(served_model)
    with pytest.raises(EngineError, match=r"lacks .* of 14 adapted layers"):
        load(loaded, elsewhere)
    with pytest.raises(EngineError, match="no adapter is loaded"):
        loaded.run(single_turn(PROMPTS, GREEDY))


@pytest.mark.shows("1.10")
def test_an_adapter_is_unloaded_if_gone_and_never_loaded_over(
    loaded: ForgetfulEngine, adapter: dict[str, Tensor]
) -> None:
    loaded.unload_adapter()
    for _ in range(2):
        load(loaded, adapter)
        loaded._server.post("/unload_lora_adapter", lora_name="policy-0")  # behind our back
        loaded.unload_adapter()
    load(loaded, adapter)
    with pytest.raises(EngineError, match="already loaded"):
        load(loaded, adapter, unloads_before=False)
    load(loaded, adapter)
    assert loaded.run(single_turn(PROMPTS, GREEDY))


Answers = Future[list[list[Sample]]]


async def seen_running(
    engine: ForgetfulEngine, sampler: HttpSampler, ask: Callable[[], Answers]
) -> Answers:
    """Ask until requests are seen to run: they may be answered before anybody looks."""
    asked = ask()
    while True:
        loads = await engine._server.client.loads(sampler._session)
        if any(load["num_running_reqs"] for load in loads):
            return asked
        asked = ask() if asked.done() else asked
        await asyncio.sleep(0.01)


def test_requests_end_with_the_adapter_that_they_began_with_while_another_one_comes(
    loaded: ForgetfulEngine, served_model: Path
) -> None:
    """Of equal prompts, whose keys and values the server keeps apart."""
    trainers = [build_lora(served_model) for _ in range(3)]
    for version, trainer in enumerate(trainers):
        randomize(trainer, scale=0.1 * (version + 1))
    long, short = (replace(GREEDY, max_response_tokens=n, temperature=1.0) for n in (50, 4))

    def ask(sampler: Sampler, sampling: SamplingParams, version: int) -> Answers:
        rows = zip(PROMPTS.token_ids_PL.unbind(), PROMPTS.prompt_index_P.tolist(), strict=True)
        asked = [
            SampleRequest(tokens, sampling.request_params(), [index], version=version)
            for tokens, index in rows
        ]
        return asyncio.gather(*[sampler.answer(request) for request in asked])

    def check(version: int, answers: list[list[Sample]]) -> None:
        samples = [sample for answer in answers for sample in answer]
        assert {sample.weight_version for sample in samples} == {version}
        rollouts = assemble_rollouts(PROMPTS, samples, policy_version=version)
        for number, trainer in enumerate(trainers):
            apart = largest_mismatch_nats(trainer, rollouts, temperature=1.0)
            assert apart < 1e-3 if number == version else apart > 1e-2

    async def program(sampler: Sampler) -> None:
        assert isinstance(sampler, HttpSampler)
        for version in range(2):
            before = await seen_running(loaded, sampler, partial(ask, sampler, long, version))
            adapter = adapter_of(trainers[version + 1])
            await asyncio.to_thread(loaded.load_adapter, adapter, version=version + 1)
            after = await ask(sampler, short, version + 1)
            check(version, await before)
            check(version + 1, after)
            await asyncio.to_thread(loaded.unload_adapter, kept={version + 1})
        with pytest.raises(EngineError, match="policy-0"):
            await ask(sampler, short, 0)

    loaded.load_adapter(adapter_of(trainers[0]), version=0)
    loaded.run(program)


def test_an_adapter_is_not_loaded_into_released_memory(loaded: ForgetfulEngine) -> None:
    stop(loaded)
    loaded.release(MemoryTag.WEIGHTS)
    with pytest.raises(PhaseError, match="load_adapter was refused: WEIGHTS is released"):
        loaded.load_adapter({}, version=0)
