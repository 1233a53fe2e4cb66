"""A whole run with a mixture of experts on FSDP2 and the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED
from tests.tiny_models import make_tiny_model


@pytest.mark.usefixtures("ray_cluster")
def test_experts_train_sleep_resume_and_are_exported(tmp_path: Path) -> None:
    folder, run_folder = tmp_path / "model", tmp_path / "run"
    make_tiny_model(folder, "qwen3_moe", vocab_size=258, num_layers=3, mlp_only_layers=[1])
    build_starter_tokenizer().save_pretrained(folder)
    still = (
        *("model.starter=null", f"model.path={folder}", "data.use_chat_template=false"),
        *(VARIED, "rollout.sleep=true", "checkpoint.every_num_steps=1", "eval.every_num_steps=0"),
        "rollout.canary_max_drift_nats=1e-3",
    )

    train(run_folder, *still, "cluster.num_ranks_per_node=2", "trainer.num_steps=2")
    lines = train(run_folder, *still, "trainer.num_steps=3")
    assert [line["policy/updates"] for line in lines] == [1, 1, 1]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    assert all(line["memory/released_bytes"] > 0 for line in lines)
    first, last = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, run_folder / "hf"))
    last_weights = last.state_dict()
    equal = [n for n, t in first.state_dict().items() if torch.equal(t, last_weights[n])]
    assert not equal
