"""Adapters that do not fit, requests that name none: what SGLang would do, and that we refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.rollout.event_loop import ProgramCall
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.sampling import Group, HttpSampler, SentContext, ServedModel
from hybridrl.workers.rollout.single_turn import single_turn
from tests.sglang.engines import greedy_of_hugging_face, sync, weights_of
from tests.sglang.lora_device import GREEDY, PROMPTS, ForgetfulEngine
from tests.workers.rollout.engines import tokens_of
from tests.workers.train.lora_engines import LORA, adapter_of, build_lora, randomize


@pytest.fixture
def loaded(lora_engine: ForgetfulEngine, served_model: Path) -> ForgetfulEngine:
    """With the base of ``served_model`` and no adapter."""
    sync(lora_engine, weights_of(served_model), version=0)
    return lora_engine


@pytest.fixture(scope="module")
def adapter(served_model: Path) -> dict[str, Tensor]:
    """One that changes what is sampled."""
    trainer = build_lora(served_model)
    randomize(trainer)
    return adapter_of(trainer)


def load(
    engine: ForgetfulEngine, adapter: dict[str, Tensor], *, unloads_before: bool = True
) -> None:
    engine.pause()
    engine.drain(timeout_s=10.0)
    try:
        if unloads_before:
            engine.unload_adapter()
        engine.load_adapter(adapter)
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


def ask(engine: ForgetfulEngine, *, adapter: str | None = None) -> list[list[int]]:
    """Send the prompts as they are spelled, past the engine's own checks."""
    answers: list[list[int]] = []
    model = ServedModel(max_context_tokens=96, vocab_size=64, version=0, adapter=adapter)
    sampler = HttpSampler(engine._server.client, model, ProgramCall(), timeout_s=60.0)
    for tokens in PROMPTS.token_ids_PL.unbind():
        ids: list[int] = tokens.tolist()
        group = Group(ids, SentContext(tuple(ids), ids, []), GREEDY.request_params(), [0])
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
    assert (
        tokens_of(loaded.run(single_turn(PROMPTS, GREEDY)))
        == ask(loaded, adapter="policy")
        != frozen
    )
    with pytest.raises(EngineError, match="never been loaded: stranger"):
        ask(loaded, adapter="stranger")


def test_nothing_is_sampled_before_an_adapter_has_come(
    loaded: ForgetfulEngine, adapter: dict[str, Tensor]
) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match="no adapter is loaded, and the frozen model alone"):
            loaded.run(single_turn(PROMPTS, GREEDY))
        load(loaded, adapter)
        assert len(loaded.run(single_turn(PROMPTS, GREEDY))) == len(PROMPTS)
        loaded.unload_adapter()


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


@pytest.mark.shows("1.9")
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    loaded: ForgetfulEngine, adapter: dict[str, Tensor]
) -> None:
    first = next(iter(adapter))
    embedding = {"model.embed_tokens.weight": torch.zeros(64, 32)}
    bad: dict[str, dict[str, Tensor]] = {
        "lacks .* of 14 adapted layers": {},
        "has too much: model.embed_tokens.weight": adapter | embedding,
        f"lacks {first}": {name: adapter[name] for name in adapter if name != first},
        "has too much: .*x_proj": adapter | {first.replace("q_proj", "x_proj"): adapter[first]},
        r"with shape \[2, 32\].*\[4, 32\].*same lora.rank": adapter | {first: torch.zeros(2, 32)},
    }
    for words, torn in bad.items():
        with pytest.raises(EngineError, match=words):
            load(loaded, torn)
        with pytest.raises(EngineError, match="no adapter is loaded"):
            loaded.run(single_turn(PROMPTS, GREEDY))
    load(loaded, adapter)
    assert loaded.run(single_turn(PROMPTS, GREEDY))


def test_a_rank_above_the_servers_limit_is_refused_by_the_server_too(
    loaded: ForgetfulEngine, adapter: dict[str, Tensor]
) -> None:
    doubled = {
        name: torch.cat([tensor, tensor], dim=0 if "lora_A" in name else 1)
        for name, tensor in adapter.items()
    }
    spec = loaded._spec
    loaded._spec = replace(spec, lora=replace(LORA, rank=2 * LORA.rank))
    try:
        with pytest.raises(EngineError, match=r"rank 8 is incompatible.*max-lora-rank"):
            load_unchecked(loaded, doubled)
    finally:
        loaded._spec = spec
    load(loaded, adapter)


@pytest.mark.shows("1.10")
def test_an_adapter_is_unloaded_if_gone_and_never_loaded_over(
    loaded: ForgetfulEngine, adapter: dict[str, Tensor]
) -> None:
    loaded.unload_adapter()
    for _ in range(2):
        load(loaded, adapter)
        loaded._server.post("/unload_lora_adapter", lora_name="policy")  # behind our back
        loaded.unload_adapter()
    load(loaded, adapter)
    with pytest.raises(EngineError, match="already loaded"):
        load(loaded, adapter, unloads_before=False)
    load(loaded, adapter)
    assert loaded.run(single_turn(PROMPTS, GREEDY))


def test_an_adapter_is_not_loaded_into_released_memory(loaded: ForgetfulEngine) -> None:
    loaded.pause()
    loaded.drain(timeout_s=10.0)
    loaded.release(MemoryTag.WEIGHTS)
    with pytest.raises(PhaseError, match="load_adapter was refused: WEIGHTS is released"):
        loaded.load_adapter({})
