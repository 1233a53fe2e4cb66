from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.errors import CheckpointError
from hybridrl.workers.train import checkpoint, offload
from hybridrl.workers.train.checkpoint import CheckpointWriter, ShardReader, is_unchanged, shards_of
from hybridrl.workers.train.shard_spec import (
    RankShards,
    ShardSpec,
    TensorRange,
    TensorShard,
    full_range,
    size_of,
    subtract,
)
from hybridrl.workers.train.shards import rank_shards
from tests.drawn import cases
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import build_fsdp2, whole_tensors
from tests.workers.train.shard_writer import write_shards


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


@pytest.mark.shows("R2.1")
def test_random_generators_resume_their_state(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint.seed_generators(3, rank=0)
    of_other_rank = _draw()
    checkpoint.seed_generators(3, rank=1)
    assert _draw() != of_other_rank
    engine = build_fsdp2(tiny_model)
    writer = CheckpointWriter()
    writer.begin(engine, tmp_path / "rank-0.safetensors", notes={})
    _draw()
    writer.begin(engine, tmp_path / "rank-1.safetensors", notes={})
    writer.close()
    expected = _draw()
    assert _draw() != expected
    checkpoint.load(engine, tmp_path, rank=1, world_size=2)
    assert _draw() == expected


@pytest.mark.shows("R1.7")
def test_full_disk_fails_one_save_and_the_next_works(tiny_model: Path, tmp_path: Path) -> None:
    engine, writer = build_fsdp2(tiny_model), CheckpointWriter()
    with pytest.raises(CheckpointError, match="call save"):
        writer.collect(waits=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        writer.begin(engine, tmp_path / "f", notes={})
        with pytest.raises(CheckpointError, match=r"cannot be written: .*; free space"):
            writer.collect(waits=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.begin(engine, tmp_path / "f", notes={})
    entry = writer.collect(waits=True)
    writer.close()
    assert entry is not None
    assert (tmp_path / "f").stat().st_size == entry.num_bytes


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.sizes.append(made.nbytes)
        return made


def test_pinned_snapshot_takes_little_more_than_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", 2**13)
    # Each pinned allocation is rounded up to a power of two, pytorch issue 150517.
    odd = make_tiny_model(tmp_path / "model", hidden_size=40, vocab_size=67)
    engine, writer = build_fsdp2(odd), CheckpointWriter()
    with _Allocations() as allocations:
        writer.begin(engine, tmp_path / "f", notes={})
    writer.close()
    pinned = sum(2 ** (size - 1).bit_length() for size in allocations.sizes)
    tensors = whole_tensors(engine).values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    each = sum(2 ** (tensor.nbytes - 1).bit_length() for tensor in tensors)
    assert num_bytes <= sum(allocations.sizes)
    assert pinned <= num_bytes + 2**13 < each


@st.composite
def _ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> list[TensorRange]:
    """Draw ranges that tile ``shape``: cut along a dimension, then each along another."""
    ranges = [full_range(shape)]
    for _ in range(draw(st.integers(0, 3))):
        cut = ranges.pop(draw(st.integers(0, len(ranges) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        begin, end = cut[dim]
        at = draw(st.integers(begin, end))
        ranges += [(*cut[:dim], side, *cut[dim + 1 :]) for side in ((begin, at), (at, end))]
    return ranges


@pytest.mark.shows("R2.3")
@cases(by_day=25, by_night=300)
@given(data=st.data())
def test_shards_of_any_ranks_fill_any_other_shards(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "shape"))
    full = torch.arange(float(torch.tensor(shape).prod())).view(shape)

    def shards(ranges: list[TensorRange], values: Tensor) -> RankShards:
        views = [(values[tuple(slice(*edge) for edge in one)], one) for one in ranges]
        return RankShards(shape, tuple(TensorShard(v, ShardSpec(shape, one)) for v, one in views))

    for copy in range(data.draw(st.integers(1, 2), "copies, each sharded in its own way")):
        ranges = data.draw(_ranges(shape))
        for half in range(2):
            owned = dict(shards_of("w", shards(ranges[half::2], full)))
            owned = {key: TensorShard(s.values.clone(), s.spec) for key, s in owned.items()}
            write_shards(folder / f"rank-{2 * copy + half}.safetensors", owned, notes={})
    with ShardReader(folder) as reader:
        target = torch.full_like(full, -1.0)
        reader.fill({"w": shards(data.draw(_ranges(shape), "wanted"), target)})
    assert torch.equal(target, full)


@pytest.mark.shows("R1.5")
@pytest.mark.parametrize("held", [[(0, 2), (1, 3)], [(0, 3)]], ids=["overlapping", "a file short"])
def test_values_that_no_file_has_are_not_read_as_zeros(
    tmp_path: Path, held: list[tuple[int, int]]
) -> None:
    for rank, (begin, end) in enumerate(held):  # of two copies 2 + 2 values, but not the last one
        part = {"w": TensorShard(torch.ones(end - begin), ShardSpec((4,), ((begin, end),)))}
        write_shards(tmp_path / f"rank-{rank}.safetensors", part, notes={})
    with ShardReader(tmp_path) as reader, pytest.raises(CheckpointError, match="3 of the 4 values"):
        reader.fill({"w": rank_shards(torch.zeros(4))})


def test_rank_without_a_shard_writes_none_but_checks_names(tmp_path: Path) -> None:
    nothing = RankShards((3,), ())
    assert list(shards_of("w", nothing)) == []
    write_shards(tmp_path / "rank-0.safetensors", {}, notes={})
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match="1 tensors missing, first: w"),
    ):
        reader.fill({"w": nothing})
    held = {"w": TensorShard(torch.ones(3), ShardSpec((3,), ((0, 3),)))}
    write_shards(tmp_path / "rank-1.safetensors", held, notes={})
    with ShardReader(tmp_path) as reader:
        reader.fill({"w": nothing})
        with pytest.raises(CheckpointError, match="of another shape"):
            reader.fill({"w": RankShards((4,), ())})


@given(data=st.data())
def test_subtract_tiles_the_remaining_range(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    counts = torch.zeros(shape)
    edges = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    inner = tuple((low, high) for low, high in edges)
    if size_of(inner) == 0:
        return
    for one in [inner, *subtract(full_range(shape), inner)]:
        assert size_of(one) > 0
        counts[tuple(slice(*edge) for edge in one)] += 1
    assert torch.equal(counts, torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_safetensors_library_reads_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).to(dtype), "n": torch.tensor(5).to(dtype)}
    parts = {name: TensorShard(tensor, ShardSpec.of(tensor)) for name, tensor in tensors.items()}
    entry = write_shards(tmp_path / "rank-0.safetensors", parts, notes={"x": [1]})
    loaded = load_file(tmp_path / entry.name)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert (tmp_path / entry.name).stat().st_size == entry.num_bytes
    with ShardReader(tmp_path) as reader:
        assert reader.notes == [{"x": [1]}]
        again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        reader.fill({name: rank_shards(tensor) for name, tensor in again.items()})
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.shows("R1.5")
def test_one_changed_byte_is_detected(tmp_path: Path) -> None:
    values = torch.arange(5.0)
    entry = write_shards(tmp_path / "f", {"w": TensorShard(values, ShardSpec.of(values))}, notes={})
    written = (tmp_path / "f").read_bytes()
    assert is_unchanged(tmp_path / "f", entry)
    for at in range(len(written)):
        changed = bytearray(written)
        changed[at] ^= 4
        (tmp_path / "f").write_bytes(changed)
        assert not is_unchanged(tmp_path / "f", entry)
    (tmp_path / "f").unlink()
    assert not is_unchanged(tmp_path / "f", entry)


@pytest.mark.shows("R2.8")
def test_error_lists_all_wrong_names_and_shapes(tmp_path: Path) -> None:
    saved = {"same": torch.zeros(2), "gone": torch.zeros(1), "wide": torch.zeros(2, 3)}
    parts = {name: TensorShard(tensor, ShardSpec.of(tensor)) for name, tensor in saved.items()}
    write_shards(tmp_path / "rank-0.safetensors", parts, notes={})
    wanted = {"same": torch.zeros(2), "new": torch.zeros(1), "wide": torch.zeros(3, 3)}
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"first: new.*first: gone.*\[2, 3\]"),
    ):
        reader.fill({name: rank_shards(tensor) for name, tensor in wanted.items()})
