from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.metrics import Sum
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.sglang.engines import kill_server, sglang_config
from tests.workers.sharding.receivers import Receivers, write_all
from tests.workers.train.engines import build_fsdp2, fsdp2_of


def change_some(trainer: PolicyEngine, seed: int) -> None:
    """Change a value in a hundred of each tensor, one of them to -0.0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in fsdp2_of(trainer).model.parameters():
            size = max(1, parameter.numel() // 100)
            at = torch.randint(0, parameter.numel(), (size,), generator=generator)
            parameter.view(-1)[at] += torch.randn(size, generator=generator)
            parameter.view(-1)[at[0]] = -0.0


def test_a_server_holds_after_changes_what_a_full_update_gives_and_so_does_its_successor(
    engine: SGLangEngine, served_model: Path, tmp_path: Path
) -> None:
    config = sglang_config(verify_weights="first", sleep=False)
    trainer, receivers = build_fsdp2(served_model), Receivers(lambda: engine, config, num_engines=1)
    publisher = receivers.publisher()
    for version in range(4):
        publisher.bring(trainer, version=version)
        engine.compare_with_files(write_all(trainer, tmp_path / str(version), dtype=config.dtype))
        sent = publisher.take_metrics()["memory/synced_bytes"]
        assert isinstance(sent, Sum)
        all_bytes = sum(tensor.nbytes for _, tensor in trainer.full_weights())
        assert sent.value == all_bytes if version == 0 else sent.value < 0.05 * all_bytes
        if version == 1:
            kill_server(engine)
            engine.restart()
            receivers.engines = [receivers.start_engine()]
        change_some(trainer, seed=version)
    assert receivers.lengths() == [1, 2, 3, 4]
    publisher.close()
    engine.continue_generation()
