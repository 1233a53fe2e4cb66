"""Adapters on SGLang through whole cycles: what it samples is the trainer's, what it is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.errors import EngineError
from hybridrl.sampler import Sample
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.memory import adapter_shapes, base_shapes
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from hybridrl.workers.train.protocol import WeightSet
from tests.sglang.lora_device import GREEDY, PROMPTS, ForgetfulEngine, ServedDevice
from tests.workers.device import WAYS, check_passes
from tests.workers.rollout.engines import load, rollout_config, tokens_of
from tests.workers.train.engines import CPU
from tests.workers.train.lora_engines import LORA, adapter_of, with_lora

_CACHE = (MemoryTag.KV_CACHE.value, MemoryTag.CUDA_GRAPH.value)


def greedy_of_the_embedded_engine(device: ServedDevice, folder: Path) -> list[Sample]:
    """What the embedded engine samples with the trainer's weights and adapter."""
    lora = device.lora if device.lora.sends_adapters else None
    engine = HFRolloutEngine(
        folder, config=rollout_config(), max_context_tokens=64, device=CPU, lora=lora
    )
    load(engine, list(device.trainer.full_weights()))
    if lora is not None:
        engine.load_adapter(dict(device.trainer.full_weights(WeightSet.ADAPTER)))
    engine.finish_update(version=device.version)
    return engine.run(single_turn(PROMPTS, GREEDY))


def assert_samples_as_the_trainer_for_three_cycles(device: ServedDevice, folder: Path) -> None:
    answers = []
    for version in range(3):
        assert device.mismatch_nats() < 1e-4
        greedy = device.sample(GREEDY)
        assert device.apart_nats(greedy, temperature=1.0) < 1e-4
        assert tokens_of(greedy) == tokens_of(greedy_of_the_embedded_engine(device, folder))
        assert device.engine.version == version
        answers.append(tokens_of(greedy))
        device.train()
    assert answers[0] != answers[1] != answers[2]


@pytest.mark.shows("1.4")
@pytest.mark.parametrize("way", WAYS)
def test_adapter_samples_are_the_trainers_in_three_cycles(
    lora_engine: ForgetfulEngine, served_model: Path, way: str
) -> None:
    device = ServedDevice(lora_engine, served_model, way)
    assert_samples_as_the_trainer_for_three_cycles(device, served_model)


@pytest.mark.shows("1.4")
@pytest.mark.parametrize("way", ["awake", "backup"])
def test_with_merged_weights_too(engine: SGLangEngine, served_model: Path, way: str) -> None:
    device = ServedDevice(engine, served_model, way, lora=with_lora(sync="merged"))
    assert_samples_as_the_trainer_for_three_cycles(device, served_model)


@pytest.mark.shows("1.7", "1.8")
@pytest.mark.parametrize("way", WAYS)
def test_the_base_goes_before_the_first_adapter_and_not_again(
    lora_engine: ForgetfulEngine, served_model: Path, way: str
) -> None:
    device = ServedDevice(lora_engine, served_model, way)
    check_passes(device, way)


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
        lora_engine.load_adapter(torn)
        with pytest.raises(EngineError, match=r"SGLang (was killed|ended)"):
            lora_engine.run(single_turn(PROMPTS, GREEDY))
    lora_engine._adapter_shapes = adapter_shapes(base_shapes(served_model), LORA)
    lora_engine.forget_journal()
    assert device.mismatch_nats() < 1e-4
    expected = {spec.name for part in WeightSet for spec in device.trainer.weight_specs(part)}
    assert set(lora_engine.received) == expected
