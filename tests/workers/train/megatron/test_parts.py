"""Checkpoints between FSDP2's engines and ranks that hold what megatron-core's would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hybridrl.config.architecture import Architecture, read_architecture
from hybridrl.errors import CheckpointError
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.critic_engine import CriticEngine
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.megatron.hf_tensors import adapter_tensors, critic_tensors, hf_tensors
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from hybridrl.workers.train.megatron.parts import (
    MODEL,
    FlatSpan,
    Pieces,
    moment_prefix,
    named_pieces,
    step_pieces,
)
from hybridrl.workers.train.protocol import LearningEngine
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.critics import CRITIC, make_lessons
from tests.workers.train.engines import CPU, build_fsdp2, make_rows, update
from tests.workers.train.engines import MODEL as AS_STORED
from tests.workers.train.lora_engines import build_lora
from tests.workers.train.megatron.shards import Shapes, local_shapes, numel

LORA_RANK = 4
LINEAR = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]

WHOLE: Mapping[str, Callable[[Architecture], Shapes]] = {
    "policy": hf_tensors,
    "critic": critic_tensors,
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
    if hasattr(engine, "compute_values"):
        engine.update(make_lessons(4, seed=seed))
    else:
        update(engine, make_rows(4, seed=seed))


class CutEngine:
    """What one of ``tp x pp x dp`` ranks has to save: flat stretches of weights and moments."""

    def __init__(
        self, folder: Path, role: str, sizes: tuple[int, int, int], place: tuple[int, int, int]
    ) -> None:
        self._architecture = read_architecture(folder)
        self._whole = WHOLE[role](self._architecture)
        self._rank = ParallelRank(tp_rank=place[0], tp_size=sizes[0])
        lora_rank = LORA_RANK if role == "adapter" else 0
        names = local_shapes(self._architecture, self._rank, is_fused=True, lora_rank=lora_rank)
        if role == "critic":
            names.pop("output_layer.weight", None)
            names |= {"score.weight": (1, self._architecture.hidden_size), "score.bias": (1,)}
        self._shapes = {
            name: shape
            for name, shape in _of_stage(names, place[1], sizes[1], self._architecture).items()
            if lora_rank == 0 or ".lora." in name
        }
        self._share = (place[2], sizes[2])
        self.num_updates = 0
        self._flat: dict[str, Tensor] = {}

    def begin_restore(self, *, num_updates: int) -> None:
        self.num_updates = num_updates
        self._step = torch.tensor(-1.0)
        size = sum(map(numel, self._shapes.values()))
        for key in ("", "exp_avg", "exp_avg_sq") if num_updates else ("",):
            self._flat[key] = torch.full((size,), torch.nan)

    def end_restore(self) -> None:
        """Nothing to tell other ranks: each was filled."""

    def checkpoint_tensors(self) -> Pieces:
        weights = self._pieces(MODEL, "")
        if not self.num_updates:
            return weights
        moments = [self._pieces(moment_prefix(k), k) for k in ("exp_avg", "exp_avg_sq")]
        return weights | step_pieces(self._step, weights) | moments[0] | moments[1]

    def _pieces(self, prefix: str, key: str) -> Pieces:
        """Divide all tensors, laid end to end, over data-parallel ranks."""
        rank, size = self._share
        flat = self._flat[key]
        low, high = (len(flat) * edge // size for edge in (rank, rank + 1))
        spans, start = [], 0
        for name, shape in self._shapes.items():
            begin, end = max(low, start), min(high, start + numel(shape))
            if begin < end:
                spans.append(FlatSpan(name, shape, begin - start, flat[begin:end]))
            start += numel(shape)
        return named_pieces(
            spans,
            prefix,
            self._whole,
            architecture=self._architecture,
            parallel=self._rank,
        )


def _of_stage(shapes: Shapes, stage: int, num_stages: int, architecture: Architecture) -> Shapes:
    """Return what a pipeline rank has; the last of several has tied embeddings once more."""
    last = num_stages - 1

    def is_here(name: str) -> bool:
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            return layer * num_stages // architecture.num_layers == stage
        return stage == (0 if name.startswith("embedding.") else last)

    here = {name: shape for name, shape in shapes.items() if is_here(name)}
    if architecture.is_tied and stage == last > 0 and "score.bias" not in here:
        here["output_layer.weight"] = shapes["embedding.word_embeddings.weight"]
    return here


def _save(engine: LearningEngine, folder: Path, *, rank: int, world_size: int) -> None:
    writer = CheckpointWriter()
    name = checkpoint.file_name(rank=rank, world_size=world_size)
    writer.begin(engine, folder / name, notes={})
    writer.collect(waits=True)
    writer.close()


def _pass_on(folder: Path, role: str, sizes: tuple[int, int, int], *, come_from: Path) -> Path:
    """Load a checkpoint on all ranks of another shape, and let them write one."""
    target = come_from.with_name(f"{come_from.name}-{'x'.join(map(str, sizes))}")
    places = list(product(*map(range, sizes)))
    for rank, place in enumerate(places):
        engine = CutEngine(folder, role, sizes, place)
        checkpoint.load(engine, come_from, rank=rank, world_size=len(places))
        _save(engine, target, rank=rank, world_size=len(places))
    return target


def _state_of(engine: LearningEngine) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in engine.checkpoint_tensors().items()}


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
def test_a_run_goes_on_through_other_parallel_sizes_and_back_bit_by_bit(
    tmp_path: Path, role: str, family: Family, is_tied: bool, num_updates: int
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_embeddings=is_tied, vocab_size=67)
    engine = _build(role, folder)
    for seed in range(num_updates):
        _learn(engine, seed)
    written = tmp_path / "saved"
    _save(engine, written, rank=0, world_size=1)
    for sizes in ((2, 2, 1), (1, 2, 3), (2, 1, 2)):
        written = _pass_on(folder, role, sizes, come_from=written)
    loaded = _build(role, folder)
    _learn(loaded, 9)
    checkpoint.load(loaded, written, rank=0, world_size=1)
    wanted, got = _state_of(engine), _state_of(loaded)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    assert loaded.num_updates == num_updates
    for either in (engine, loaded):
        _learn(either, 3)
    again = _state_of(loaded)
    assert all(torch.equal(tensor, again[n]) for n, tensor in _state_of(engine).items())


def test_a_rank_writes_only_what_it_has_something_of(tmp_path: Path) -> None:
    engine = build_fsdp2(make_tiny_model(tmp_path / "model"))
    _learn(engine, 0)
    _save(engine, tmp_path / "saved", rank=0, world_size=1)
    written = _pass_on(tmp_path / "model", "policy", (1, 2, 1), come_from=tmp_path / "saved")
    for rank in range(2):
        with safe_open(written / checkpoint.file_name(rank=rank, world_size=2), "pt") as file:
            names = {name for name in file.keys() if ".layers." in name}  # noqa: SIM118
        assert names
        assert {name.partition(".layers.")[2][0] for name in names} == {str(rank)}


def test_ranks_that_hold_little_refuse_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path / "small", num_layers=2)
    large = make_tiny_model(tmp_path / "large", num_layers=4)
    _save(build_fsdp2(large), tmp_path / "saved", rank=0, world_size=1)
    first_stage = CutEngine(small, "policy", (1, 2, 1), (0, 0, 0))
    with pytest.raises(CheckpointError, match=r"22 tensors: is too much, first: model.hf.model.la"):
        checkpoint.load(first_stage, tmp_path / "saved", rank=0, world_size=2)


def test_a_rank_whose_file_is_gone_is_missed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    _save(build_fsdp2(folder), tmp_path / "saved", rank=0, world_size=1)
    written = _pass_on(folder, "policy", (2, 1, 2), come_from=tmp_path / "saved")
    (written / checkpoint.file_name(rank=3, world_size=4)).unlink()
    with pytest.raises(CheckpointError, match="a file is missing"):
        checkpoint.load(build_fsdp2(folder), written, rank=0, world_size=1)
