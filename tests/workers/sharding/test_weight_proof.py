from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.errors import LedgerError
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding import weight_files
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_files import WeightCopy, WeightSource, load_weights
from tests.ranks import run_ranks
from tests.workers.rollout.engines import (
    make_prompts,
    rollout_config,
    sampling_params,
    unsynced_engine,
)
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
    engine = unsynced_engine(folder, config=config)
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


@pytest.mark.shows("4.24")
def test_a_torn_sync_is_found_where_it_is_compared(tiny_model: Path) -> None:
    # Passes: files, first sync, second sync; the last is torn and nobody looks any more.
    assert _sync_with_a_torn_pass(0, tiny_model, 0, 2) == ["", "", ""]
    assert _sync_with_a_torn_pass(0, tiny_model, 0, 1, "never") == ["", "", ""]
    # Passes: files and sync, three times; that of the second sync is torn.
    first, second, third = _sync_with_a_torn_pass(0, tiny_model, 0, 3, "always")
    assert (first, third) == ("", "")
    assert "1 weights of the rollout engine are not the trainer's" in second
    assert "model.norm.weight" in second


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


class CountingEngine(HFRolloutEngine):
    num_compared = 0
    spoils = ""

    def verify_weights(self) -> None:
        self.num_compared += 1
        super().verify_weights()

    def stage(self, bucket: Bucket) -> StagedBucket:
        return super().stage(
            [(n, t + 1.0 if self.spoils and self.spoils in n else t) for n, t in bucket]
        )


def managed_engine(folder: Path, verified: Verified) -> tuple[ManagedEngine, CountingEngine]:
    config = replace(rollout_config(), verify_weights=verified)
    engine = CountingEngine(folder, config=config, max_context_tokens=32, device=CPU)
    managed = ManagedEngine(engine, config=config, device=CPU)
    managed.start()
    managed.resume_weights()
    return managed, engine


def load(managed: ManagedEngine, source: WeightSource, *, version: int) -> None:
    load_weights(managed, source=source, version=version, bucket_bytes=2**14)


@pytest.fixture(scope="module", params=["files", "broadcast"])
def source(request: pytest.FixtureRequest, tiny_model: Path) -> WeightSource:
    if request.param == "files":
        return tiny_model
    weights = list(load_file(tiny_model / "model.safetensors").items())
    buckets = (weights[:7], weights[7:])
    return WeightCopy(set(dict(weights)), [partial(list, each) for each in buckets])


@pytest.mark.parametrize(("verified", "counts"), [("never", 0), ("first", 1), ("always", 3)])
@pytest.mark.shows("4.24")
def test_weights_are_compared_as_often_as_asked(
    tiny_model: Path,
    source: WeightSource,
    verified: Verified,
    counts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    managed, engine = managed_engine(tiny_model, verified)
    for version in range(3):
        load(managed, source, version=version)
        assert engine.version == version
    assert engine.num_compared == counts
    assert not list(tmp_path.glob("hybridrl-received-*"))
    expected = load_file(tiny_model / "model.safetensors")
    served = dict(engine._model.named_parameters())
    for name, tensor in expected.items():
        torch.testing.assert_close(served[name].data, tensor, atol=0, rtol=0)
    managed.restart()
    managed.start()
    managed.resume_weights()
    load(managed, source, version=3)
    assert engine.num_compared == counts + (verified != "never")


@pytest.mark.shows("4.24")
def test_a_tensor_that_differs_is_named_and_compared_again(
    tiny_model: Path, source: WeightSource
) -> None:
    managed, engine = managed_engine(tiny_model, "first")
    for _ in range(2):
        engine.spoils = "layers.1.mlp.down_proj"
        with pytest.raises(LedgerError, match=r"1 weights .*model\.layers\.1\.mlp\.down_proj"):
            load(managed, source, version=0)
        assert not managed.is_proved
    engine.spoils = ""
    load(managed, source, version=0)
    assert managed.is_proved
    engine.spoils = "norm"  # which nobody looks at any more
    load(managed, source, version=1)
