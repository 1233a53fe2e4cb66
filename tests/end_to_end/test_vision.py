from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_model_that_sees_learns_on_two_ranks_resumes_and_is_exported(tmp_path: Path) -> None:
    still = (
        *("model=starter_that_sees", "data=read_numbers", "model.freeze_vision=false", VARIED),
        *("model.starter.num_warmup_steps=2", "data.max_digits=2", "data.max_prompt_tokens=32"),
        *("rollout.sleep=true", "rollout.max_response_tokens=4", "eval.every_num_steps=0"),
        *("checkpoint.every_num_steps=1", "cluster.num_ranks_per_node=2"),
        *("actor.optimizer.lr=1e-2", "rollout.canary_max_drift_nats=1e-3"),
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    lines = train(whole, *still, "trainer.num_steps=3")
    train(broken, *still, "trainer.num_steps=1")
    train(broken, *still, "trainer.num_steps=3")
    assert [line["policy/updates"] for line in lines] == [1, 1, 1]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    one, other = (load_file(folder / "hf" / "model.safetensors") for folder in (whole, broken))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    towers = [name for name in one if "visual" in name]
    assert towers
    AutoModelForImageTextToText.from_pretrained(whole / "hf")
