from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from hybridrl.workers.rollout.embedded.fused_model import FusedForward, fuse
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots
from hybridrl.workers.rollout.embedded.model import (
    Forward,
    build_model,
    load_config,
    make_slots,
    transformers_forward,
)
from hybridrl.workers.rollout.single_turn import single_turn
from tests.models.test_onednn import Recorder
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params

NUM_SLOTS, NUM_PLACES = 5, 16
TOKENS = torch.tensor([3, 9, 27, 17, 51, 25, 11])
LENGTHS = torch.tensor([4, 2, 1])


def built(folder: Path) -> tuple[torch.nn.Module, KVSlots]:
    config = load_config(folder, max_context_tokens=NUM_PLACES)
    model = build_model(config, torch.float32, torch.device("cpu"))
    return model, make_slots(model, folder, NUM_SLOTS, NUM_PLACES)


def test_it_takes_few_operations(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    model, slots = built(folder)
    fused = fuse(model)
    assert fused is not None
    counts = {}
    forwards: dict[str, Forward] = {
        "transformers": partial(transformers_forward, model),
        "ours": FusedForward(model, fused, NUM_PLACES),
    }
    for name, forward in forwards.items():
        with torch.no_grad(), Recorder() as recorder:
            forward(TOKENS[:3], slots.decode_step(LENGTHS, 5))
        counts[name] = len(recorder.names)
    assert 3 * counts["ours"] < 2 * counts["transformers"]


def test_a_family_that_it_does_not_know_stays_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    model, _ = built(folder)
    model.config.hidden_act = "gelu"  # type: ignore[union-attr]
    assert fuse(model) is None
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))


def test_an_engine_samples_by_it(tmp_path: Path) -> None:
    engine = ready_engine(make_tiny_model(tmp_path))
    with Recorder() as recorder:
        engine.run(single_turn(make_prompts((3, 5)), sampling_params(tokens=4)))
    assert "aten.linalg_vector_norm.default" in recorder.names  # of its norms
    assert not any(name.startswith("aten.pow") for name in recorder.names)  # of transformers'
