from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hybridrl.errors import CheckpointError
from hybridrl.workers.train.shard_files import (
    Part,
    Place,
    ShardReader,
    is_unchanged,
    write_parts,
)
from tests.ranks import run_ranks


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_parts_cut_in_any_way_fill_parts_cut_in_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), "shape")
    whole = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    for rank, (begin, end) in enumerate(_cuts(data, shape[0])):
        place = Place(tuple(shape), (begin, *[0] * (len(shape) - 1)))
        part = Part(whole[begin:end].clone(), place)
        write_parts(folder / f"rank-{rank:05}.safetensors", {"w": part}, notes={})
    with ShardReader(folder) as reader:
        for begin, end in _cuts(data, shape[0]):
            target = torch.full_like(whole[begin:end], -1.0)
            place = Place(tuple(shape), (begin, *[0] * (len(shape) - 1)))
            reader._fill("w", target, place)
            assert torch.equal(target, whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_file_is_a_safetensors_file_that_others_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).to(dtype), "n": torch.tensor(5).to(dtype)}
    parts = {name: Part(tensor, Place.of(tensor)) for name, tensor in tensors.items()}
    entry = write_parts(tmp_path / "rank-0.safetensors", parts, notes={"x": [1]})
    loaded = load_file(tmp_path / entry.name)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert (tmp_path / entry.name).stat().st_size == entry.num_bytes
    with ShardReader(tmp_path) as reader:
        assert reader.notes == [{"x": [1]}]
        again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        reader.fill(again)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_changed_byte_anywhere_is_seen(tmp_path: Path) -> None:
    values = torch.arange(5.0)
    entry = write_parts(tmp_path / "f", {"w": Part(values, Place.of(values))}, notes={})
    whole = (tmp_path / "f").read_bytes()
    assert is_unchanged(tmp_path / "f", entry)
    for at in range(len(whole)):
        torn = bytearray(whole)
        torn[at] ^= 4
        (tmp_path / "f").write_bytes(torn)
        assert not is_unchanged(tmp_path / "f", entry)
    (tmp_path / "f").unlink()
    assert not is_unchanged(tmp_path / "f", entry)


def test_other_names_and_shapes_are_all_named_at_once(tmp_path: Path) -> None:
    saved = {"same": torch.zeros(2), "gone": torch.zeros(1), "wide": torch.zeros(2, 3)}
    parts = {name: Part(tensor, Place.of(tensor)) for name, tensor in saved.items()}
    write_parts(tmp_path / "rank-0.safetensors", parts, notes={})
    wanted = {"same": torch.zeros(2), "new": torch.zeros(1), "wide": torch.zeros(3, 3)}
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"first: new.*first: gone.*\[2, 3\]"),
    ):
        reader.fill(wanted)


def test_a_file_that_is_missing_is_not_taken_for_zeros(tmp_path: Path) -> None:
    part = Part(torch.ones(1, 2), Place((2, 2), (0, 0)))
    write_parts(tmp_path / "rank-0.safetensors", {"w": part}, notes={})
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match="2 of the 4 values"),
    ):
        reader.fill({"w": torch.zeros(2, 2)})


def test_a_full_disk_is_an_error_and_no_short_file(tmp_path: Path) -> None:
    values = torch.zeros(100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # as much room as that
    try:
        with pytest.raises(OSError, match=r"no space|too large"):
            write_parts(tmp_path / "f", {"w": Part(values, Place.of(values))}, notes={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _write_sharded(rank: int, folder: Path) -> None:
    tensors = _sharded(init_device_mesh("cpu", (2,)), fill=False)
    parts = {n: Part(t.to_local().clone(), Place.of(t)) for n, t in tensors.items()}
    write_parts(folder / f"rank-{rank:05}.safetensors", parts, notes={})


def _read_sharded(rank: int, folder: Path) -> dict[str, Tensor]:
    tensors = _sharded(init_device_mesh("cpu", (3,)), fill=True)
    with ShardReader(folder) as reader:
        reader.fill(tensors)
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


def _sharded(mesh: object, *, fill: bool) -> dict[str, DTensor]:
    whole = {"odd": torch.arange(35.0).view(7, 5), "short": torch.arange(2.0)}
    whole = {n: torch.full_like(t, -1.0) if fill else t for n, t in whole.items()}
    return {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in whole.items()}  # type: ignore[arg-type]


def test_two_ranks_write_and_three_read_the_same_tensors(tmp_path: Path) -> None:
    run_ranks(2, _write_sharded, tmp_path)
    for tensors in run_ranks(3, _read_sharded, tmp_path):
        assert torch.equal(tensors["odd"], torch.arange(35.0).view(7, 5))
        assert torch.equal(tensors["short"], torch.arange(2.0))


def _cuts(data: st.DataObject, length: int) -> list[tuple[int, int]]:
    inner = sorted(data.draw(st.lists(st.integers(0, length), max_size=3)))
    edges = [0, *inner, length]
    return [(b, e) for b, e in pairwise(edges)]
