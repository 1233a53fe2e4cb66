from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hybridrl.workers.train.checkpoint import CheckpointWriter
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import Rank, RanksUnderTest, take_step
from tests.workers.train.engines import make_lessons, make_rows, to_supervised
from tests.workers.train.lora_engines import LORA

LINEAR = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = (
    *("self_attn.q_norm", "self_attn.k_norm"),
    *("input_layernorm", "post_attention_layernorm"),
)
BODY = {
    "hf.model.embed_tokens.weight",
    "hf.model.norm.weight",
    *(f"hf.model.layers.{n}.{name}.weight" for n in range(2) for name in (*LINEAR, *NORMS)),
}
LEARNING = {
    "policy": BODY,
    "supervised": BODY,
    "critic": BODY | {"hf.score.weight", "hf.score.bias"},
    "adapter": {
        f"hf.model.layers.{n}.{name}.lora_{matrix}.default.weight"
        for n in range(2)
        for name in LINEAR
        for matrix in "AB"
    },
}
"""Tensors that learn, by the kind of engine."""

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _save(rank: Rank, folder: Path, kind: str, target: Path) -> None:
    lora: dict[str, Any] = {"lora": LORA} if kind == "adapter" else {}
    engine: Any = rank.critic(folder) if kind == "critic" else rank.policy(folder, **lora)
    writer = CheckpointWriter()
    for num_updates in range(2):
        writer.begin(engine, target / f"{num_updates}.safetensors", notes={"version": 7})
        writer.collect(waits=True)
        if kind == "critic":
            engine.update(make_lessons(4))
        elif kind == "supervised":
            engine.fit(to_supervised(make_rows(4)))
        else:
            take_step(engine, make_rows(4))
    writer.close()


@on_layouts(first_only=True)
@pytest.mark.parametrize("kind", [*LEARNING])
def test_names_in_a_checkpoint_file_stay(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path, kind: str
) -> None:
    ranks.run(_save, folder, kind, tmp_path)
    weights = {f"model.{name}" for name in LEARNING[kind]}
    moments = {f"optimizer.{moment}.{name}" for moment in MOMENTS for name in LEARNING[kind]}
    for num_updates, names in enumerate([weights, weights | moments]):
        with safe_open(tmp_path / f"{num_updates}.safetensors", "pt") as file:
            # A tensor of which a rank has several boxes is numbered: NAME#0.
            assert {key.partition("#")[0] for key in file.keys()} == names  # noqa: SIM118
            assert {*file.metadata()} == {"notes", "places"}
