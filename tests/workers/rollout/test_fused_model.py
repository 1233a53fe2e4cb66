from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.workers.rollout.embedded.fused_model import FusedForward, fuse
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots, KVStep
from hybridrl.workers.rollout.embedded.model import (
    Forward,
    TransformersForward,
    build_model,
    load_config,
    make_slots,
)
from hybridrl.workers.rollout.single_turn import single_turn
from tests.models.test_onednn import Recorder
from tests.tiny_models import Family, make_tiny_model
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params

NUM_SLOTS, NUM_PLACES = 5, 16
TOKENS = torch.tensor([3, 9, 27, 17, 51, 25, 11])
ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 2])
PLACES = torch.tensor([0, 1, 2, 3, 0, 1, 0])
LENGTHS = torch.tensor([4, 2, 1])


def built(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, KVSlots]:
    config = load_config(folder, max_context_tokens=NUM_PLACES)
    model = build_model(config, dtype, torch.device("cpu"))
    return model, make_slots(model, folder, NUM_SLOTS, NUM_PLACES)


def fill(model: torch.nn.Module, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in load_file(folder / "model.safetensors").items():
        parameters[name].data.copy_(tensor)


@torch.inference_mode()
def logits_of(forward: Forward, slots: KVSlots) -> Tensor:
    """A prefill of three prompts of 4, 2 and 1 tokens, and a decode step after it."""
    prompts = KVStep(
        slots.kv_YSJCD, PLACES, row_T=ROWS, longest=4, mask_R11L=None, states=slots.states
    )
    first = forward(TOKENS, prompts, logits_at=torch.tensor([3, 5, 6]))
    return torch.cat([first, forward(TOKENS[:3], slots.decode_step(LENGTHS, 5))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}),
        ("llama", {}),
        ("mistral", {"sliding_window": 2}),
    ],
)
def test_its_logits_are_transformers(
    family: Family, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family, **changes)
    model, slots = built(folder, dtype)
    fused = fuse(model)
    assert fused is not None
    fill(model, folder)  # afterwards: who writes a parameter writes into the joined matrix
    found = logits_of(FusedForward(model, fused, NUM_PLACES), slots)
    slots.kv_YSJCD.zero_()
    expected = logits_of(TransformersForward(model), slots)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_it_takes_few_operations(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    model, slots = built(folder)
    fused = fuse(model)
    assert fused is not None
    counts = {}
    forwards: dict[str, Forward] = {
        "transformers": TransformersForward(model),
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
