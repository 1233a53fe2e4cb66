"""Weights from files or from the copy of a broadcast, compared on demand with those of files."""

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
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_files import WeightCopy, WeightSource, load_weights
from tests.workers.rollout.engines import rollout_config
from tests.workers.train.engines import CPU

Verified = Literal["never", "first", "always"]


class CountingEngine(HFRolloutEngine):
    """Counts comparisons, and may spoil one tensor on its way."""

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
    return WeightCopy(frozenset(dict(weights)), tuple(partial(list, each) for each in buckets))


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
