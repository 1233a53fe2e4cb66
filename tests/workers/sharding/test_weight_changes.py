from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.config.serving import WeightRoute
from hybridrl.errors import LedgerError
from hybridrl.metrics import Sum
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_changes import KeptWeights, SentWeights
from hybridrl.workers.sharding.weight_files import load_weights
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.workers.rollout.engines import CPU, load, rollout_config, unsynced_engine
from tests.workers.sharding.receivers import Receivers, write_all
from tests.workers.train.engines import build_fsdp2, fsdp2_of, make_rows, update, with_optimizer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {n: t.reshape(-1).view(_BITS[t.itemsize]).tolist() for n, t in weights.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changes_give_the_bits_of_the_newest_weights(dtype: torch.dtype) -> None:
    sent, kept = SentWeights(dtype), KeptWeights()
    weights = {
        "matrix": torch.randn(40, 30).T,  # not contiguous
        "norm": torch.ones(64),
        "scale": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "table": torch.arange(200),
        "far": torch.zeros(70_000, 2),
    }
    for step in range(4):
        for bucket in ([*weights.items()][:3], [*weights.items()][3:]):
            kept.write(sent.changes(bucket))
        floats = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        assert bits(kept.tensors) == bits(floats)
        assert {t.dtype for n, t in kept.tensors.items() if n != "table"} == {dtype}
        weights["matrix"][3, step] = [0.5, -0.0, 0.0, 7.0][step]
        weights["norm"] = weights["norm"] + 1.0
        weights["scale"] = -weights["scale"]
        weights["table"][step] = -1
        weights["far"][69_999, 1] += 1.0


def test_a_change_is_one_of_bits_and_not_of_values() -> None:
    sent = SentWeights(torch.float32)
    weights = torch.zeros(1000)
    weights[4] = torch.nan
    sent.changes([("w", weights)])
    assert sent.changes([("w", weights)]) == []  # though no NaN equals another
    weights[1] = -0.0
    weights.view(torch.int32)[4] ^= 1  # another NaN
    changes = dict(sent.changes([("w", weights)]))
    assert changes["w#gaps"].tolist() == [1, 3]
    kept = KeptWeights()
    kept.write([("w", torch.zeros(1000).index_fill(0, torch.tensor(4), torch.nan))])
    kept.write(list(changes.items()))
    assert bits(kept.tensors) == bits({"w": weights})


def test_few_changes_are_few_bytes_and_many_are_the_whole_tensor() -> None:
    sent = SentWeights(torch.bfloat16)
    weights = torch.zeros(10_000)
    sent.changes([("w", weights)])
    weights[:100] = 1.0
    few = sent.changes([("w", weights)])
    assert sum(t.nbytes for _, t in few) == 100 * 4 + 8  # gap and value, and one checksum
    weights[:] = 2.0
    (whole,) = sent.changes([("w", weights)])
    assert whole[0] == "w"
    assert whole[1].nbytes == 20_000


def test_changes_fit_on_nothing_but_the_weights_before_them() -> None:
    sent, kept = SentWeights(torch.float32), KeptWeights()
    weights = torch.arange(100.0)
    kept.write(sent.changes([("w", weights)]))
    weights[3] = 0.5
    sent.changes([("w", weights)])  # this one is lost
    weights[4] = 0.5
    with pytest.raises(LedgerError, match=r"w: the changes of an update .*weight_deltas=false"):
        kept.write(sent.changes([("w", weights)]))


def test_a_chain_is_continued_where_it_was_left_or_begun_anew() -> None:
    kept = KeptWeights()
    assert kept.missing("one", 2) == range(2)
    kept.note_written("one", 2)
    assert kept.missing("one", 4) == range(2, 4)
    assert kept.missing("one", 4) == range(4)  # as the last time broke off
    kept.note_written("one", 4)
    assert kept.missing("two", 4) == range(4)


def held_by(managed: ManagedEngine) -> dict[str, list[int]]:
    engine = managed.engine
    assert isinstance(engine, HFRolloutEngine)
    return bits(dict(engine._model.named_parameters()))


def receivers_of(
    model: Path, dtype: Literal["bfloat16", "float32"], weights: WeightRoute = "files"
) -> Receivers:
    config = replace(rollout_config(dtype=dtype), verify_weights="first", sleep=False)
    return Receivers(
        lambda: unsynced_engine(model, dtype=dtype), config, num_engines=2, weights=weights
    )


def held_after_a_full_update(
    receivers: Receivers, source: PolicyEngine, folder: Path
) -> dict[str, list[int]]:
    managed = receivers.start_engine()
    files = write_all(source, folder, dtype=receivers.config.dtype)
    load_weights(managed, source=files, version=0, bucket_bytes=2**12)
    return held_by(managed)


@pytest.fixture
def no_folders_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("hybridrl-*")) == []


@pytest.mark.usefixtures("no_folders_are_left", "ray_cluster")
@pytest.mark.parametrize("weights", ["files", "broadcast"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_engines_hold_after_each_update_what_a_full_one_would_have_given(
    tiny_model: Path, tmp_path: Path, dtype: Literal["bfloat16", "float32"], weights: WeightRoute
) -> None:
    actor = with_optimizer(lr=1e-6, eps=1e-8)
    trainer = build_fsdp2(tiny_model, config=actor)
    receivers = receivers_of(tiny_model, dtype, weights)
    publisher = receivers.publisher()
    num_bytes = []
    for version in range(5):
        publisher.bring(trainer, version=version)
        expected = held_after_a_full_update(receivers, trainer, tmp_path / f"full{version}")
        for managed in receivers.engines:
            assert held_by(managed) == expected
            assert managed.is_proved
        sent = publisher.take_metrics()["memory/synced_bytes"]
        assert isinstance(sent, Sum)
        num_bytes.append(sent.value)
        if version == 2:
            receivers.engines[1] = receivers.start_engine()  # it was killed
        update(trainer, make_rows(4, seed=version))
    if dtype == "bfloat16":
        assert receivers.lengths() == [1, 2, 3, 4, 5]
        assert max(num_bytes[1:]) < 0.3 * num_bytes[0]
    publisher.close()


@pytest.mark.usefixtures("no_folders_are_left")
def test_all_weights_are_sent_again_when_changes_are_no_less_or_one_knows_not_what_engines_have(
    tiny_model: Path,
) -> None:
    trainer, receivers = build_fsdp2(tiny_model), receivers_of(tiny_model, "float32")
    publisher = receivers.publisher()
    for version in range(4):
        publisher.bring(trainer, version=version)
        with torch.no_grad():
            for parameter in fsdp2_of(trainer).model.parameters():
                parameter.add_(1e-3)  # so that all values change
    assert receivers.lengths() == [1, 2, 1, 2]
    receivers.errors = [StageError("sync", {1: "gone"}, of="engine") for _ in range(3)]
    with pytest.raises(StageError):
        publisher.bring(trainer, version=4)
    publisher.bring(trainer, version=4)
    assert receivers.lengths()[4:] == [1, 1, 1, 1]
    publisher.close()


class Reader(HFRolloutEngine):
    """Reads folders, as an encoder does."""

    is_frozen = False

    def read_files(self, folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            load(self, list(load_file(file).items()))


@pytest.mark.usefixtures("no_folders_are_left")
def test_an_engine_that_reads_folders_gets_the_newest_weights_in_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    actor = with_optimizer(lr=1e-6, eps=1e-8)
    trainer = build_fsdp2(tiny_model, config=actor)
    config = replace(rollout_config(dtype="bfloat16"), sleep=False)
    build = partial(Reader, tiny_model, config=config, max_context_tokens=32, device=CPU)
    receivers = Receivers(build, config, num_engines=1)
    publisher = receivers.publisher()
    for version in range(2):
        publisher.bring(trainer, version=version)
        files = write_all(trainer, tmp_path / str(version), dtype="bfloat16")
        usual = receivers_of(tiny_model, "bfloat16").engines[0]
        load_weights(usual, source=files, version=version, bucket_bytes=2**12)
        assert held_by(receivers.engines[0]) == held_by(usual)
        update(trainer, make_rows(4))
    assert receivers.lengths() == [1, 2]
    publisher.close()


@pytest.mark.usefixtures("no_folders_are_left")
def test_changes_that_are_not_finite_are_refused_as_files_are(tiny_model: Path) -> None:
    trainer, receivers = build_fsdp2(tiny_model), receivers_of(tiny_model, "bfloat16")
    publisher = receivers.publisher()
    publisher.bring(trainer, version=0)
    with torch.no_grad():
        next(fsdp2_of(trainer).model.parameters()).view(-1)[5] = torch.nan
    with pytest.raises(StageError, match=r"ModelError: an update: .* contains NaN or infinity"):
        publisher.bring(trainer, version=1)
    publisher.close()
