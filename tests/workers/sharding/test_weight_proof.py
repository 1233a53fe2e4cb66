"""The first sync to an engine is compared with the same weights from files, on every rank."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.workers.rollout.buckets import stage_by_reference
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding import weight_files
from hybridrl.workers.sharding.control import StageError
from tests.ranks import run_ranks
from tests.workers.rollout.engines import make_prompts, rollout_config, sampling_params
from tests.workers.sharding.faulty_streams import tear
from tests.workers.sharding.managers import sharding_manager
from tests.workers.train.engines import CPU, build_fsdp2

Verified = Literal["never", "first", "always"]
PROMPTS, SAMPLING = make_prompts((4, 9)), sampling_params(group=2, tokens=4)


def _sync_with_a_torn_pass(
    rank: int, folder: Path, torn_rank: int, at_pass: int, verified: Verified = "first"
) -> list[str]:
    """Sample three times; return what went wrong each time."""
    config = replace(rollout_config(), verify_weights=verified)
    engine = HFRolloutEngine(folder, config=config, max_context_tokens=32, device=CPU)
    manager = sharding_manager(engine, config=config)
    trainer = build_fsdp2(folder)
    manager.attach_policy(trainer)
    if rank == torn_rank:
        tear(trainer, word="norm", at_pass=at_pass)
    reasons = []
    for version in range(3):
        manager.weights_changed(version=version)
        try:
            with manager.rollout_phase():
                engine.run(single_turn(PROMPTS, SAMPLING))
            reasons.append("")
        except StageError as error:
            reasons.append(str(error))
    return reasons


def test_a_true_first_sync_passes_and_nothing_is_compared_later(tiny_model: Path) -> None:
    # Passes: files, first sync, second sync; the last is torn and nobody looks any more.
    assert _sync_with_a_torn_pass(0, tiny_model, 0, 2) == ["", "", ""]


@pytest.mark.shows("4.24")
def test_on_demand_each_sync_of_fused_engines_is_compared(tiny_model: Path) -> None:
    # Passes: files and sync, three times; that of the second sync is torn.
    first, second, third = _sync_with_a_torn_pass(0, tiny_model, 0, 3, "always")
    assert (first, third) == ("", "")
    assert "1 weights of the rollout engine are not the trainer's" in second
    assert "model.norm.weight" in second
    assert _sync_with_a_torn_pass(0, tiny_model, 0, 1, "never") == ["", "", ""]


@pytest.mark.parametrize("torn_rank", [0, 1])
def test_all_ranks_hear_of_the_one_whose_engine_is_wrong(tiny_model: Path, torn_rank: int) -> None:
    for first, *later in run_ranks(2, _sync_with_a_torn_pass, tiny_model, torn_rank, 1):
        assert f"engine {torn_rank}: LedgerError" in first
        assert later == ["", ""]


def test_a_folder_of_buckets_can_be_loaded_and_is_removed(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    (tmp_path / "weights").mkdir()
    folder = WeightFolder(tmp_path / "weights", dtype=torch.bfloat16)
    for item in [*weights.items(), ("step", torch.tensor([7]))]:
        folder.write(stage_by_reference([item]), [])
    files = sorted(folder.folder.glob("*.safetensors"))
    assert len(files) == len(weights) + 1
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert found.pop("step").tolist() == [7]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    for _ in range(2):
        folder.remove()
        assert not folder.folder.exists()


class Noting(HFRolloutEngine):
    """The embedded engine, writing down the proofs that it was asked for."""

    def load_reference_weights(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        self.proofs.append(
            (folder.name, {str(t.dtype) for f in files for t in load_file(f).values()})
        )
        super().load_reference_weights(folder)

    proofs: list[tuple[str, set[str]]]


def _proofs_on_two_nodes(rank: int, model: Path, folder: Path) -> list[tuple[str, set[str]]]:
    """Ranks 0 and 1 are on one node, 2 on another. All sample, engine 1 restarts, all sample."""
    tempfile.tempdir = str(folder)
    weight_files.place_of_temporary_files = lambda: f"node {rank // 2}"
    config = replace(rollout_config(), verify_weights="first", dtype="bfloat16")
    engine = Noting(model, config=config, max_context_tokens=32, device=CPU)
    engine.proofs = []
    manager = sharding_manager(engine, config=config)
    manager.attach_policy(build_fsdp2(model))
    for phase in range(2):
        with manager.rollout_phase():
            engine.run(single_turn(PROMPTS, SAMPLING))
        if phase == 0 and rank == 1:
            managed = manager._engines.managed
            assert managed is not None
            managed.restart()
            managed.start()
    return engine.proofs


def test_one_proof_is_written_a_node_and_a_restart_proves_one_engine(
    tiny_model: Path, tmp_path: Path
) -> None:
    zero, one, two = run_ranks(3, _proofs_on_two_nodes, tiny_model, tmp_path)
    assert [len(proofs) for proofs in (zero, one, two)] == [1, 2, 1]
    assert zero[0] == one[0]  # the same folder
    assert zero[0][0] != two[0][0]
    assert all(dtypes == {"torch.bfloat16"} for _, dtypes in zero + one + two)
    assert list(tmp_path.glob("hybridrl-first-sync-*")) == []
