from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hybridrl.metrics import Sum
from hybridrl.serving.launching import start_servers
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.config.values import config_of
from tests.sglang.engines import kill_server, own_schedulers, sglang_config
from tests.sglang.weights import GREEDY, PROMPTS
from tests.waiting import wait_until
from tests.workers.rollout.engines import greedy_of_hugging_face, tokens_of
from tests.workers.sharding.managers import rank_of_servers
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


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_cluster")
def test_after_a_broadcast_changes_alone_follow_and_a_lost_server_gets_them_all(
    served_model: Path, tmp_path: Path
) -> None:
    config = config_of(
        *("serving=own", "rollout=sglang", "serving.weights=broadcast", "rollout.bucket_mib=1"),
        *("serving.weight_deltas=true", "rollout.verify_weights=always"),
        *("data.max_prompt_tokens=36", "rollout.max_response_tokens=16"),
        *("rollout.stage_timeout_s=60", "cluster.call_timeout_s=300"),
    )
    trainer = build_fsdp2(served_model)
    with start_servers(config, served_model, variables={}) as servers:
        rank = rank_of_servers(servers, config.rollout)
        rank.attach_policy(trainer)

        def require_sampled(version: int) -> None:
            samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
            expected = greedy_of_hugging_face(tmp_path / str(version), PROMPTS, num_tokens=8)
            assert tokens_of(samples) == tokens_of(expected)
            assert {sample.weight_version for sample in samples} == {version}

        num_bytes = []
        for version in range(3):
            shutil.copytree(served_model, tmp_path / str(version))
            files = write_all(trainer, tmp_path / f"{version}-files", dtype=config.rollout.dtype)
            shutil.copytree(files, tmp_path / str(version), dirs_exist_ok=True)
            (tmp_path / str(version) / "model.safetensors").unlink()
            rank.weights_changed(version=version)
            with rank.rollout_phase():
                require_sampled(version)
                sent = rank.take_metrics()["memory/synced_bytes"]
                assert isinstance(sent, Sum)
                num_bytes.append(sent.value)
                if version == 1:  # the next change fits on what its successor gets
                    own_schedulers()[1].kill()
                    wait_until(lambda: len(own_schedulers()) == 1)
                    require_sampled(version)
                    wait_until(lambda: len(own_schedulers()) == 2, deadline_s=100)
            change_some(trainer, seed=version)
        assert max(num_bytes[1:]) < 0.05 * num_bytes[0]
        rank.shutdown()
