"""Checkpoints between FSDP2's engines and ranks that hold what megatron-core's would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hybridrl.errors import CheckpointError
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.megatron.architecture import HEAD, adapter_tensors, hf_tensors
from hybridrl.workers.train.megatron.checkpoint import MOMENTS, OwnedSpan, checkpoint_tensors
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.shard_map import ShardMap
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import LearningEngine
from hybridrl.workers.train.shard_spec import RankShards
from hybridrl.workers.train.value_engines import CriticEngine
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.critics import CRITIC, make_lessons
from tests.workers.train.engines import CPU, build_fsdp2, make_rows, update, whole_tensors
from tests.workers.train.engines import MODEL as AS_STORED
from tests.workers.train.lora_engines import build_lora
from tests.workers.train.megatron.shards import Shapes, local_shapes, numel

LORA_RANK = 4
LINEAR = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]


def _critic_tensors(architecture: Architecture) -> Shapes:
    body = {name: shape for name, shape in hf_tensors(architecture).items() if name != HEAD}
    return body | {"score.weight": (1, architecture.hidden_size), "score.bias": (1,)}


FULL_SHAPES: Mapping[str, Callable[[Architecture], Shapes]] = {
    "policy": hf_tensors,
    "critic": _critic_tensors,
    "adapter": lambda architecture: adapter_tensors(architecture, LINEAR, LORA_RANK),
}


def _build(role: str, folder: Path) -> LearningEngine:
    if role == "critic":
        backend = FSDP2Backend(
            folder, config=CRITIC, model_config=AS_STORED, num_total_steps=10, device=CPU
        )
        return CriticEngine(backend, value_clip=CRITIC.value_clip)
    return build_fsdp2(folder) if role == "policy" else build_lora(folder)


def _learn(engine: LearningEngine, seed: int) -> None:
    if isinstance(engine, CriticEngine):
        engine.update(make_lessons(4, seed=seed))
    else:
        assert isinstance(engine, PolicyEngine)
        update(engine, make_rows(4, seed=seed))


class ShardedEngine:
    """One of ``tp x pp x dp`` ranks, with its flat spans of weights and moments."""

    def __init__(
        self,
        folder: Path,
        role: str,
        sizes: tuple[int, int, int],
        coordinates: tuple[int, int, int],
    ) -> None:
        architecture = read_architecture(folder)
        rank = ParallelRank(tp_rank=coordinates[0], tp_size=sizes[0])
        self._full_shapes = FULL_SHAPES[role](architecture)
        self._shard_map = ShardMap(architecture, rank)
        lora_rank = LORA_RANK if role == "adapter" else 0
        names = local_shapes(architecture, rank, is_fused=True, lora_rank=lora_rank)
        if role == "critic":
            names.pop("output_layer.weight", None)
            names |= {"score.weight": (1, architecture.hidden_size), "score.bias": (1,)}
        self._shapes = {
            name: shape
            for name, shape in _of_stage(names, coordinates[1], sizes[1], architecture).items()
            if lora_rank == 0 or ".lora." in name
        }
        self._share = (coordinates[2], sizes[2])
        self.num_updates = 0
        self._flat: dict[str, Tensor] = {}

    def begin_restore(self, *, num_updates: int) -> None:
        self.num_updates = num_updates
        size = sum(map(numel, self._shapes.values()))
        for key in ("", "exp_avg", "exp_avg_sq") if num_updates else ("",):
            self._flat[key] = torch.full((size,), torch.nan)

    def end_restore(self) -> None:
        """Do nothing: every rank was filled."""

    def checkpoint_tensors(self) -> dict[str, RankShards]:
        return checkpoint_tensors(
            self._spans(),
            self._full_shapes,
            shard_map=self._shard_map,
            num_steps=self.num_updates,
        )

    def _spans(self) -> list[OwnedSpan]:
        """Divide all tensors, laid end to end, over data-parallel ranks."""
        rank, size = self._share
        num_elements = len(self._flat[""])
        low, high = (num_elements * edge // size for edge in (rank, rank + 1))
        spans, start = [], 0
        for name, shape in self._shapes.items():
            begin, end = max(low, start), min(high, start + numel(shape))
            if begin < end:
                master, *moments = (flat[begin:end] for flat in self._flat.values())
                named = dict(zip(MOMENTS, moments, strict=False))
                spans.append(OwnedSpan(name, shape, begin - start, master, named))
            start += numel(shape)
        return spans


def _of_stage(shapes: Shapes, stage: int, num_stages: int, architecture: Architecture) -> Shapes:
    """Return what a pipeline rank has; the last of several has tied embeddings once more."""
    last = num_stages - 1

    def is_of_stage(name: str) -> bool:
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            return layer * num_stages // architecture.num_layers == stage
        return stage == (0 if name.startswith("embedding.") else last)

    own = {name: shape for name, shape in shapes.items() if is_of_stage(name)}
    if architecture.is_tied and stage == last > 0 and "score.bias" not in own:
        own["output_layer.weight"] = shapes["embedding.word_embeddings.weight"]
    return own


def _save(engine: LearningEngine, folder: Path, *, rank: int, world_size: int) -> None:
    writer = CheckpointWriter()
    name = checkpoint.file_name(rank=rank, world_size=world_size)
    writer.begin(engine, folder / name, notes={})
    writer.collect(waits=True)
    writer.close()


def _reshard(folder: Path, role: str, sizes: tuple[int, int, int], *, source: Path) -> Path:
    """Load a checkpoint on all ranks of another shape, and let them write one."""
    target = source.with_name(f"{source.name}-{'x'.join(map(str, sizes))}")
    ranks = list(product(*map(range, sizes)))
    for rank, (tp_rank, pp_rank, dp_rank) in enumerate(ranks):
        engine = ShardedEngine(folder, role, sizes, (tp_rank, pp_rank, dp_rank))
        checkpoint.load(engine, source, rank=rank, world_size=len(ranks))
        _save(engine, target, rank=rank, world_size=len(ranks))
    return target


def _copy_tensors(engine: LearningEngine) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in whole_tensors(engine).items()}


@pytest.mark.parametrize(
    ("role", "family", "is_tied", "num_updates"),
    [
        ("policy", "qwen3", True, 2),
        ("policy", "qwen2", False, 2),
        ("policy", "llama", True, 0),
        ("critic", "qwen3", True, 1),
        ("adapter", "qwen3", True, 1),
    ],
)
def test_resume_through_other_sizes_is_bitwise_identical(
    tmp_path: Path, role: str, family: Family, is_tied: bool, num_updates: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_embeddings=is_tied, vocab_size=67)
    engine = _build(role, folder)
    for seed in range(num_updates):
        _learn(engine, seed)
    written = tmp_path / "saved"
    _save(engine, written, rank=0, world_size=1)
    for sizes in ((2, 2, 1), (1, 2, 3), (2, 1, 2)):
        written = _reshard(folder, role, sizes, source=written)
    loaded = _build(role, folder)
    _learn(loaded, 9)
    checkpoint.load(loaded, written, rank=0, world_size=1)
    wanted, got = _copy_tensors(engine), _copy_tensors(loaded)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    assert loaded.num_updates == num_updates
    for either in (engine, loaded):
        _learn(either, 3)
    again = _copy_tensors(loaded)
    assert all(torch.equal(tensor, again[n]) for n, tensor in _copy_tensors(engine).items())


def test_rank_writes_only_tensors_of_its_shards(tmp_path: Path) -> None:
    engine = build_fsdp2(make_tiny_model(tmp_path / "model"))
    _learn(engine, 0)
    _save(engine, tmp_path / "saved", rank=0, world_size=1)
    written = _reshard(tmp_path / "model", "policy", (1, 2, 1), source=tmp_path / "saved")
    for rank in range(2):
        with safe_open(written / checkpoint.file_name(rank=rank, world_size=2), "pt") as file:
            names = {name for name in file.keys() if ".layers." in name}  # noqa: SIM118
        assert names
        assert {name.partition(".layers.")[2][0] for name in names} == {str(rank)}


def test_pipeline_rank_rejects_checkpoint_of_another_model(tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path / "small", num_layers=2)
    large = make_tiny_model(tmp_path / "large", num_layers=4)
    _save(build_fsdp2(large), tmp_path / "saved", rank=0, world_size=1)
    first_stage = ShardedEngine(small, "policy", (1, 2, 1), (0, 0, 0))
    with pytest.raises(CheckpointError, match=r"22 tensors unexpected, first: model.hf.model.la"):
        checkpoint.load(first_stage, tmp_path / "saved", rank=0, world_size=2)


def test_missing_rank_file_is_detected(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    _save(build_fsdp2(folder), tmp_path / "saved", rank=0, world_size=1)
    written = _reshard(folder, "policy", (2, 1, 2), source=tmp_path / "saved")
    (written / checkpoint.file_name(rank=3, world_size=4)).unlink()
    with pytest.raises(CheckpointError, match="a file is missing"):
        checkpoint.load(build_fsdp2(folder), written, rank=0, world_size=1)
