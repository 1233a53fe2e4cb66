from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.errors import EngineError, ModelError, PhaseError
from hybridrl.sampler import Sample, Sampler
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.embedded.tensor_memory import TensorMemory
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.single_turn import single_turn
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import (
    load,
    make_prompts,
    ready_engine,
    sampling_params,
    send_weights,
    stop,
    tokens_of,
    unsynced_engine,
)


def buffer_names(engine: HFRolloutEngine) -> frozenset[str]:
    return frozenset(memory.name for memory in engine.weight_memory() if memory.is_buffer)


def sleep(engine: HFRolloutEngine, backup: frozenset[str]) -> None:
    assert stop(engine) == 0
    engine.release(MemoryTag.WEIGHTS, backup=backup)
    engine.release(MemoryTag.KV_CACHE)
    engine.release(MemoryTag.CUDA_GRAPH)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_weight_memory_lists_what_save_pretrained_writes_and_buffers(
    tie_embeddings: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, tie_embeddings=tie_embeddings)
    engine, saved = unsynced_engine(folder), load_file(folder / "model.safetensors")
    listed = {memory.name: memory for memory in engine.weight_memory()}
    sizes = {name: memory.num_bytes for name, memory in listed.items() if not memory.is_buffer}
    assert sizes == {name: tensor.nbytes for name, tensor in saved.items()}
    assert "model.rotary_emb.inv_freq" in buffer_names(engine)
    assert engine.resident_bytes(MemoryTag.WEIGHTS) == sum(
        memory.num_bytes for memory in listed.values()
    )


def test_sleeping_frees_every_byte_and_waking_samples_as_before(tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4, 9))
    expected = tokens_of(engine.run(single_turn(prompts, sampling_params())))
    held = {part: engine.resident_bytes(part) for part in MemoryTag}
    assert held[MemoryTag.KV_CACHE] == 2 * 2 * 8 * 2 * 32 * 8 * 4
    assert held[MemoryTag.CUDA_GRAPH] == 0
    for _ in range(3):
        sleep(engine, buffer_names(engine))
        assert [engine.resident_bytes(part) for part in MemoryTag] == [0, 0, 0]
        engine.resume(MemoryTag.WEIGHTS)
        send_weights(engine, tiny_model)
        assert engine.resident_bytes(MemoryTag.KV_CACHE) == 0
        engine.resume(MemoryTag.KV_CACHE)
        engine.resume(MemoryTag.CUDA_GRAPH)
        engine.continue_generation()
        assert {part: engine.resident_bytes(part) for part in MemoryTag} == held
        assert tokens_of(engine.run(single_turn(prompts, sampling_params()))) == expected


def test_lost_weights_and_buffers_never_look_plausible(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    everything = frozenset(memory.name for memory in engine.weight_memory())
    for backup in (everything - {"model.layers.1.mlp.up_proj.weight"}, frozenset()):
        sleep(engine, backup)
        for part in MemoryTag:
            engine.resume(part)
        engine.continue_generation()
        if not backup:  # buffers are lost, and no sync sends them
            send_weights(engine, tiny_model)
        with pytest.raises(EngineError, match=r"not finite.*lost in a release"):
            engine.run(single_turn(make_prompts((4,)), sampling_params()))


@pytest.mark.shows("3.6")
@pytest.mark.parametrize("part", list(MemoryTag))
def test_generate_is_refused_while_a_part_is_released(part: MemoryTag, tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4,))
    engine.release(part, backup=buffer_names(engine) if part is MemoryTag.WEIGHTS else frozenset())
    with pytest.raises(PhaseError, match=f"{part.name} is released"):
        engine.run(single_turn(prompts, sampling_params()))
    engine.resume(part)
    send_weights(engine, tiny_model)
    assert engine.run(single_turn(prompts, sampling_params()))


@pytest.mark.shows("2.10", "3.5")
def test_memory_is_touched_where_it_is_and_not_under_a_rollout(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    with engine._gate.admit():
        with pytest.raises(PhaseError, match="release of WEIGHTS was refused"):
            engine.release(MemoryTag.WEIGHTS)
        with pytest.raises(PhaseError, match="load of weights was refused"):
            send_weights(engine, tiny_model)
    engine.release(MemoryTag.KV_CACHE)
    send_weights(engine, tiny_model)  # weights are readable and writable without the cache
    engine.release(MemoryTag.WEIGHTS)
    with pytest.raises(PhaseError, match="load of weights was refused: WEIGHTS is released"):
        send_weights(engine, tiny_model)


@pytest.mark.shows("1.19", "2.9")
def test_a_drain_past_its_deadline_aborts_the_rollout(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=1, max_context_tokens=128)
    prompts, long = make_prompts([4] * 64), sampling_params(group=64, tokens=120)
    for _ in range(2):
        samples = Event()

        async def program(sampler: Sampler, samples: Event = samples) -> list[Sample]:
            asyncio.get_running_loop().call_later(0.01, samples.set)
            return await single_turn(prompts, long)(sampler)

        with ThreadPoolExecutor(1) as pool:
            generating = pool.submit(engine.run, program)
            assert samples.wait(60.0)
            assert engine.drain(timeout_s=0.0) == 4096
            engine.pause()
            with pytest.raises(EngineError, match=r"aborted \d+ of 4096 requests"):
                generating.result(60.0)
        engine.release(MemoryTag.KV_CACHE)
        engine.resume(MemoryTag.KV_CACHE)
        engine.continue_generation()
        assert engine.run(single_turn(make_prompts((4,)), sampling_params()))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.wieght", torch.ones(32), "did you mean 'model.norm.weight'"),
        ("model.norm.weight", torch.ones(31), r"shape \[31\], the rollout model has \[32\]"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int64), "torch.int64.*does not cast"),
        ("lm_head.weight", torch.ones(64, 32), "'lm_head.weight' is tied"),
    ],
)
def test_a_weight_that_does_not_fit_refuses_its_bucket_by_name(
    name: str, tensor: torch.Tensor, message: str, tiny_model: Path
) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4, 9))
    expected = tokens_of(engine.run(single_turn(prompts, sampling_params())))
    bad_bucket = [("model.embed_tokens.weight", torch.zeros(64, 32)), (name, tensor)]
    with pytest.raises(EngineError, match=message):
        load(engine, bad_bucket)
    assert tokens_of(engine.run(single_turn(prompts, sampling_params()))) == expected


@pytest.mark.shows("5.8")
def test_an_update_copies_and_casts(tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4, 9))
    expected = tokens_of(engine.run(single_turn(prompts, sampling_params())))
    weights = load_file(tiny_model / "model.safetensors")
    doubles = [(name, tensor.double()) for name, tensor in weights.items()]
    load(engine, doubles)
    for _, tensor in doubles:
        tensor.zero_()  # the sender reuses its bucket
    engine.finish_update(version=3)
    assert engine.version == 3
    assert tokens_of(engine.run(single_turn(prompts, sampling_params()))) == expected


@pytest.mark.shows("1.6")
def test_restart_boots_anew_and_samples_as_before_after_a_sync(tiny_model: Path) -> None:
    engine, prompts = ready_engine(tiny_model), make_prompts((4, 9))
    expected = tokens_of(engine.run(single_turn(prompts, sampling_params())))
    for _ in range(2):
        engine.release(MemoryTag.WEIGHTS)
        engine.restart()
        assert engine.version == -1
        with pytest.raises(EngineError, match="never sent"):
            engine.run(single_turn(prompts, sampling_params()))
        send_weights(engine, tiny_model)
        assert tokens_of(engine.run(single_turn(prompts, sampling_params()))) == expected


def test_after_shutdown_nothing_is_held_and_nothing_is_served(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    for _ in range(2):
        engine.shutdown()
        assert [engine.resident_bytes(part) for part in MemoryTag] == [0, 0, 0]
        with pytest.raises(PhaseError):
            engine.run(single_turn(make_prompts((4,)), sampling_params()))


def test_a_folder_or_a_context_that_is_no_models_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; set model\.path"):
        unsynced_engine(tmp_path)
    with pytest.raises(ModelError, match=r"may take 129 tokens, .* takes 128"):
        unsynced_engine(tiny_model, max_context_tokens=129)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is null"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
    ],
)
def test_attention_that_the_engine_does_not_know_is_refused(
    setting: dict[str, object], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    settings = json.loads((tiny_model / "config.json").read_text()) | setting
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        unsynced_engine(tmp_path)


def test_released_tensors_come_back_as_lost_or_from_their_copies() -> None:
    whole = torch.arange(6.0)
    tensors = {"a": torch.ones(4, 8), "front": whole[:2], "back": whole[2:]}
    tensors["count"] = torch.tensor([7])
    memory = TensorMemory("weights", tensors, lost_value=float("nan"))
    num_bytes = memory.resident_bytes()
    assert num_bytes == 32 * 4 + 6 * 4 + 8  # views of one storage count once
    with pytest.raises(PhaseError, match="resident already"):
        memory.resume()
    with pytest.raises(EngineError, match=r"'aa'.*did you mean 'a'"):
        memory.release(frozenset({"a", "aa"}))
    assert tensors["a"].sum().item() == 32.0
    for _ in range(3):
        memory.release(frozenset({"front", "back"}))
        assert memory.resident_bytes() == 0
        assert memory.is_resident is False
        with pytest.raises(PhaseError, match="released already"):
            memory.release(frozenset({"a"}))
        memory.resume()
        assert memory.resident_bytes() == num_bytes
        assert tensors["a"].isnan().all()
        assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert tensors["count"].tolist() == [torch.iinfo(torch.int64).min]
    for _ in range(2):
        memory.free()
        assert memory.resident_bytes() == 0


@pytest.mark.shows("3.13")
def test_a_resume_without_room_frees_all_and_can_be_repeated() -> None:
    tensors = {"small": torch.ones(2), "large": torch.ones(2)}
    memory = TensorMemory("the KV cache", tensors, lost_value=0.0)
    memory.release(frozenset({"small"}))
    storage, num_bytes = memory._storages[1]
    memory._storages[1] = (storage, 1 << 60)
    with pytest.raises(EngineError, match=r"the KV cache needs .* GiB"):
        memory.resume()
    assert memory.resident_bytes() == 0
    memory._storages[1] = (storage, num_bytes)
    memory.resume()
    assert tensors["small"].tolist() == [1.0, 1.0]
