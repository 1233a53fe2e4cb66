from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from hybridrl.data.conversations import lay_out_conversations
from hybridrl.errors import ModelError
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.value_engines import RewardEngine
from tests.tiny_models import DENSE, Family, make_tiny_classifier
from tests.workers.train.engines import ACTOR, CPU, MODEL

CONVERSATIONS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5], [40, 41, 42], [5, 6, 7, 9]]
PAD = 3


def build(folder: Path) -> RewardEngine:
    backend = FSDP2Backend(
        folder, config=ACTOR, model_config=MODEL, device=CPU, kind="reward_model"
    )
    return RewardEngine(backend)


def padded() -> Tensor:
    longest = max(map(len, CONVERSATIONS))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in CONVERSATIONS])


def scores_of_transformers(folder: Path) -> Tensor:
    """By its classifier, or by its body alone where it has none of the family."""
    ids = padded()
    mask = (ids != PAD).long()
    config = AutoConfig.from_pretrained(folder)
    with torch.no_grad():
        if type(config) in AutoModelForSequenceClassification._model_mapping:
            classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
            return classifier(ids, attention_mask=mask).logits[:, 0]
        body = AutoModel.from_pretrained(folder).eval()
        hidden_BLH = body(ids, attention_mask=mask).last_hidden_state
        last_BH = hidden_BLH[torch.arange(len(ids)), mask.sum(1) - 1]
        return last_BH @ load_file(folder / "model.safetensors")["score.weight"][0]


BY_DAY = ("phi3", "gemma3_text", "qwen3_5_text")
"""Layers that are joined, windows, and a state, of which transformers has no classifier."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.nightly] * (f not in BY_DAY)) for f in DENSE]
)
def test_scores_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "model", family, pad_token_id=PAD)
    expected = scores_of_transformers(folder)
    engine = build(folder)
    rewards_B = engine.compute_rewards(lay_out_conversations(CONVERSATIONS)).rewards_B
    torch.testing.assert_close(rewards_B, expected, rtol=1e-4, atol=1e-4)
    assert rewards_B.std() > 0.1
    assert engine.resident_bytes(TrainState.GRADIENTS) == 0


@pytest.mark.parametrize("num_labels", [2, 3])
def test_more_labels_are_refused(num_labels: int, tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "model", num_labels=num_labels)
    with pytest.raises(ModelError, match=r"score\.weight is \[., 32\]"):
        build(folder)
