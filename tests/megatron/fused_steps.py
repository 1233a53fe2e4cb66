"""Two steps with TransformerEngine's layers, and two with FSDP2's or megatron-core's own.

``python -m tests.megatron.fused_steps FOLDER OTHER TARGET``: a program of its own, as megatron-core
looks for TransformerEngine once, while it is imported.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.workers.process_group import end_process_group, start_process_group
from tests.config.values import config_of
from tests.megatron.stand_ins import install
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    build_fsdp2,
    make_rows,
    to_rollouts,
    update,
    weights_of,
)


def build(folder: Path, layers: str) -> Any:
    install()
    from hybridrl.workers.train.mcore.engine import MegatronEngine
    from hybridrl.workers.train.mcore.setting import Setting

    megatron = replace(config_of().megatron, layers=layers)  # type: ignore[arg-type]
    setting = Setting(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0)
    config = replace(ACTOR, engine="megatron")
    return MegatronEngine(folder, config=config, setting=setting, num_total_steps=10)


def two_steps(engine: Any) -> dict[str, Any]:
    rows = make_rows(8, num_siblings=2)
    steps = []
    for _ in range(2):
        scores = engine.compute_logprobs(to_rollouts(rows), temperature=0.9)
        norm = update(engine, rows)["policy/grad_norm"]
        steps.append((scores.logprobs_BL.values(), norm))
    return {"steps": steps, "weights": weights_of(engine)}


def main(folder: Path, other: str, target: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    start_process_group(device="cpu", local_rank=0, timeout_s=60.0)
    fused = build(folder, "transformer_engine")
    found = {"fused": two_steps(fused)}
    found["names"] = [name for name, _ in fused.named_tensors()]  # type: ignore[assignment]
    plain = build_fsdp2(folder) if other == "fsdp2" else build(folder, other)
    torch.save(found | {"plain": two_steps(plain)}, target)
    end_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
