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
from hybridrl.workers.train.places import ShardedPieces, ShardSpec, TensorShard, rest_of, size_of
from hybridrl.workers.train.shard_files import ShardReader, is_unchanged, parts_of, write_parts
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
        place = ShardSpec(tuple(shape), (begin, *[0] * (len(shape) - 1)))
        part = TensorShard(whole[begin:end].clone(), place)
        write_parts(folder / f"rank-{rank:05}.safetensors", {"w": part}, notes={})
    with ShardReader(folder) as reader:
        for begin, end in _cuts(data, shape[0]):
            target = torch.full_like(whole[begin:end], -1.0)
            part = TensorShard(target, ShardSpec(tuple(shape), (begin, *[0] * (len(shape) - 1))))
            reader.fill({"w": ShardedPieces(tuple(shape), (part,))})
            assert torch.equal(target, whole[begin:end])


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Draw boxes that tile ``shape``: cut along a dimension, then each part along another."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 3))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        begin, end = box[dim]
        at = draw(st.integers(begin, end))
        boxes += [(*box[:dim], cut, *box[dim + 1 :]) for cut in ((begin, at), (at, end))]
    return boxes


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_pieces_of_several_ranks_fill_pieces_cut_in_any_other_way(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "shape"))
    whole = torch.arange(float(torch.tensor(shape).prod())).view(shape)

    def pieces(boxes: list[tuple[tuple[int, int], ...]], values: Tensor) -> ShardedPieces:
        parts = []
        for box in boxes:
            view = values[tuple(slice(*edge) for edge in box)]
            parts.append(TensorShard(view, ShardSpec(shape, tuple(begin for begin, _ in box))))
        return ShardedPieces(shape, tuple(parts))

    for copy in range(data.draw(st.integers(1, 2), "copies, each cut in its own way")):
        boxes = data.draw(_boxes(shape))
        for half in range(2):
            held = dict(parts_of("w", pieces(boxes[half::2], whole)))
            held = {key: TensorShard(part.values.clone(), part.place) for key, part in held.items()}
            write_parts(folder / f"rank-{2 * copy + half}.safetensors", held, notes={})
    with ShardReader(folder) as reader:
        target = torch.full_like(whole, -1.0)
        wanted = data.draw(_boxes(shape), "wanted")
        reader.fill({"w": pieces(wanted, target)})
    assert torch.equal(target, whole)


def test_copies_that_overlap_do_not_hide_what_is_missing(tmp_path: Path) -> None:
    for rank, (begin, end) in enumerate([(0, 2), (1, 3)]):  # 2 + 2 values, but not the last one
        held = {"w": TensorShard(torch.ones(end - begin), ShardSpec((4,), (begin,)))}
        write_parts(tmp_path / f"rank-{rank}.safetensors", held, notes={})
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match="3 of the 4 values"),
    ):
        reader.fill({"w": torch.zeros(4)})


def test_a_rank_without_a_piece_writes_nothing_and_still_knows_the_tensor(tmp_path: Path) -> None:
    nothing = ShardedPieces((3,), ())
    assert list(parts_of("w", nothing)) == []
    write_parts(tmp_path / "rank-0.safetensors", {}, notes={})
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match="is missing, first: w"),
    ):
        reader.fill({"w": nothing})
    held = {"w": TensorShard(torch.ones(3), ShardSpec((3,), (0,)))}
    write_parts(tmp_path / "rank-1.safetensors", held, notes={})
    with ShardReader(tmp_path) as reader:
        reader.fill({"w": nothing})
        with pytest.raises(CheckpointError, match="has another shape"):
            reader.fill({"w": ShardedPieces((4,), ())})


@given(data=st.data())
def test_a_box_is_what_is_cut_out_of_it_and_the_rest(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    counts = torch.zeros(shape)
    edges = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    inner = tuple((low, high) for low, high in edges)
    if size_of(inner) == 0:
        return
    for box in [inner, *rest_of(tuple((0, size) for size in shape), inner)]:
        assert size_of(box) > 0
        counts[tuple(slice(*edge) for edge in box)] += 1
    assert torch.equal(counts, torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_file_is_a_safetensors_file_that_others_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).to(dtype), "n": torch.tensor(5).to(dtype)}
    parts = {name: TensorShard(tensor, ShardSpec.of(tensor)) for name, tensor in tensors.items()}
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
    entry = write_parts(tmp_path / "f", {"w": TensorShard(values, ShardSpec.of(values))}, notes={})
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
    parts = {name: TensorShard(tensor, ShardSpec.of(tensor)) for name, tensor in saved.items()}
    write_parts(tmp_path / "rank-0.safetensors", parts, notes={})
    wanted = {"same": torch.zeros(2), "new": torch.zeros(1), "wide": torch.zeros(3, 3)}
    with (
        ShardReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"first: new.*first: gone.*\[2, 3\]"),
    ):
        reader.fill(wanted)


def test_a_file_that_is_missing_is_not_taken_for_zeros(tmp_path: Path) -> None:
    part = TensorShard(torch.ones(1, 2), ShardSpec((2, 2), (0, 0)))
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
            write_parts(tmp_path / "f", {"w": TensorShard(values, ShardSpec.of(values))}, notes={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _write_sharded(rank: int, folder: Path) -> None:
    tensors = _sharded(init_device_mesh("cpu", (2,)), fill=False)
    parts = {n: TensorShard(t.to_local().clone(), ShardSpec.of(t)) for n, t in tensors.items()}
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
