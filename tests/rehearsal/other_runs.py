"""Ranks of runs that ``mode=plan`` does not execute, or not so: see ``KINDS``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from hybridrl.batch import (
    PreferenceBatch,
    RolloutBatch,
    SupervisedBatch,
    jagged,
    row_lengths,
)
from hybridrl.config.serving import ServingConfig
from hybridrl.rehearsal import cycle
from hybridrl.rehearsal.cycle import Cycle, join
from hybridrl.rehearsal.model_folder import HollowFile
from hybridrl.rehearsal.prompts import longest_prompts
from hybridrl.rehearsal.server import RehearsedManager
from hybridrl.workers import actor_rollout, build
from hybridrl.workers.offline import PreferenceWorker, RewardModelWorker, SupervisedWorker
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.embedded import decoding, engine
from hybridrl.workers.rollout.embedded import prefill as prefilling
from hybridrl.workers.rollout.embedded.decoding import Decoding
from hybridrl.workers.sharding import weight_files
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.model_engine import ModelEngine

_NUM_ROWS, _NUM_ANSWERED = 4, 6
_WORKERS: dict[str, Any] = {
    "sft": SupervisedWorker,
    "dpo": PreferenceWorker,
    "reward_model": RewardModelWorker,
}


class OfflineCycle(Cycle):
    """A rank that samples nothing: it evaluates, learns from rows, and learns from none."""

    worker: Any

    def build(self) -> None:
        """Build the worker of the mode; a hollow folder has no tokenizer."""
        join(self.config.cluster.num_ranks, self._rank)
        vars(build).update(load_tokenizer=lambda *_, **__: None, pad_token_of=lambda *_: 0)
        kind = _WORKERS[self.config.mode]
        self.worker = kind.__new__(kind)
        self.worker.fused = {}
        self.worker.__init__(self.config, self._folder)

    def step(self) -> None:
        """Do what the driver asks of a rank in a step with an evaluation."""
        for is_answered in (True, False):  # a rank may have no row of a step that others have
            batch = self._batch(is_answered=is_answered)
            if self.config.needs_reference and isinstance(batch, PreferenceBatch):
                batch.reference_logprobs_B = self.worker.compute_reference(batch)
            self.worker.evaluate(batch)
            self.worker.update(batch)

    def _batch(self, *, is_answered: bool) -> SupervisedBatch | PreferenceBatch:
        prompts = longest_prompts(self.config, _NUM_ROWS).token_ids_PL.unbind()
        rows = [torch.cat([prompt_L, prompt_L[:_NUM_ANSWERED]]) for prompt_L in prompts]
        mode = self.config.mode
        first = -1 if mode == "reward_model" else -_NUM_ANSWERED  # a reward is that of the last
        masks = [torch.zeros_like(row_L, dtype=torch.bool) for row_L in rows]
        for mask_L in masks:
            mask_L[first:] = is_answered
        if mode == "sft":
            return SupervisedBatch(jagged(rows), jagged(masks), batch_size=[_NUM_ROWS])
        margins_B = torch.ones(_NUM_ROWS) if mode == "reward_model" else None
        return PreferenceBatch(
            jagged(rows), jagged(masks), margins_B=margins_B, batch_size=[_NUM_ROWS]
        )

    def _engines(self) -> Iterator[tuple[str, ModelEngine]]:
        yield "actor", self.worker.checkpointed_engine()
        if isinstance(reference := getattr(self.worker, "_reference", None), ModelEngine):
            yield "reference", reference

    def _export(self) -> None:
        self.worker.export_hf(self._folder.parent / "export")
        if self.config.lora.enabled:
            self.worker.export_adapter(self._folder.parent / "adapter")


class ResumedCycle(Cycle):
    """A rank that continues from the files of a checkpoint, as if a single one had all shards."""

    def _save(self) -> None:
        folder = self._folder.parent / "checkpoint"
        headers: list[bytes] = []
        opened: Any = lambda path, **_: _Opened(path, self._gpu)  # noqa: E731
        vars(checkpoint).update(_write=lambda _, header, __: headers.append(header))
        vars(checkpoint).update(safe_open=opened)
        self.worker.save(folder)
        self.worker.collect_saved(waits=True)
        tensors = self.worker.checkpointed_engine().checkpoint_tensors()
        shapes = {name: list(tensor.full_shape) for name, tensor in tensors.items()}
        entries: dict[str, object] = {name: _entry(shape) for name, shape in shapes.items()}
        places = {name: (shape, [0] * len(shape)) for name, shape in shapes.items()}
        notes = _read_header(headers[-1])["__metadata__"]["notes"]
        entries["__metadata__"] = {"places": json.dumps(places), "notes": notes}
        text = json.dumps(entries).encode()
        folder.mkdir()
        num_ranks = self.config.cluster.num_ranks
        for rank in range(num_ranks):
            name = checkpoint.file_name(rank=rank, world_size=num_ranks)
            (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
        self.worker.load(folder)


def _entry(shape: list[int]) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}


def _read_header(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


class _Opened(HollowFile):
    def __init__(self, path: Path, gpu: Any) -> None:
        super().__init__(path, gpu)
        self._metadata: dict[str, str] = _read_header(path.read_bytes())["__metadata__"]

    def metadata(self) -> dict[str, str]:
        return self._metadata

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PublishingCycle(Cycle):
    """A rank whose servers get weights as ``serving`` says: its rank 0 sends, nobody receives."""

    def build(self) -> None:
        """Build with another manager; buckets in Ray's store stay where they are."""
        vars(weight_files).update(ray=SimpleNamespace(put=lambda bucket: bucket))
        vars(cycle).update(RehearsedManager=partial(_SendingManager, self.config.serving))
        super().build()


class _SendingManager(RehearsedManager):
    def __init__(self, serving: ServingConfig) -> None:
        super().__init__()
        self.weights, self.weight_deltas = serving.weights, serving.weight_deltas
        self.__post_init__()

    def begin_update(self, *, version: int, device: torch.device) -> None:
        super().begin_update(version=version, device=device)
        self._group._device = device

    def _call(self, name: str, *args: object, **_: object) -> Any:
        if name == "begin_update":
            [self._version] = args  # type: ignore[assignment]
        return {}

    def leave(self) -> None:
        self._group.leave()


class AgenticCycle(Cycle):
    """A rank whose rows have what programs, sampling masks and teachers bring: all columns."""

    def build(self) -> None:
        """Build with other rows behind the sampler's."""
        vars(actor_rollout).update(assemble_rollouts=_assemble_all_columns)
        super().build()


def _assemble_all_columns(*args: Any, **given: Any) -> RolloutBatch:
    """Let a row be two sequences; the second begins in the response, two tokens of which it reads.

    Each token was one of three; teachers are asked in turns, with three more tokens of a prompt.
    """
    rollouts = assemble_rollouts(*args, **given)
    lengths_B, num_rows = row_lengths(rollouts.token_ids_BL), len(rollouts)
    masks = [mask_L.clone() for mask_L in rollouts.response_mask_BL.unbind()]
    begins = [int(mask_L.nonzero()[0]) for mask_L in masks]
    for mask_L in masks:
        mask_L[-_NUM_ANSWERED : 2 - _NUM_ANSWERED] = False
    rollouts.response_mask_BL = jagged(masks)
    ends = [torch.tensor([n - _NUM_ANSWERED, _NUM_ANSWERED]) for n in lengths_B.tolist()]
    rollouts.sequence_lengths_BQ = jagged(ends)
    counts = [mask_L.int() * 3 for mask_L in masks]
    rollouts.mask_counts_BL = jagged(counts)
    ids = [torch.arange(int(count_L.sum()), dtype=torch.int32) % 3 for count_L in counts]
    rollouts.mask_ids_BM = jagged(ids)
    rollouts.teacher_B = torch.arange(num_rows) % 2
    rollouts.prompt_tokens_B = torch.tensor(begins)
    rollouts.teacher_prompt_BN = jagged([torch.ones(n + 3, dtype=torch.int64) for n in begins])
    return rollouts


class EmbeddedCycle(Cycle):
    """A rank with the embedded engine on the GPU; what a step reads from there is answered."""

    def build(self) -> None:
        """Build with answers: responses have full length, weights their sums."""
        self.config = replace(self.config, rollout=replace(self.config.rollout, engine="hf"))
        draw, run, repeat = Decoding._draw, prefilling.prefill, Tensor.repeat_interleave
        num_tokens = [0]

        def ended(self: Decoding, logits_NV: Tensor) -> Tensor:
            draw(self, logits_NV)
            most = [seat.request.asked.params.max_new_tokens for seat in self._seats]
            drawn = [self._step - seat.first_step + 1 for seat in self._seats]
            return torch.tensor(drawn) >= torch.tensor(most)

        def prefill(forward: Any, slots: Any, contexts: Any, prefixes: Any, **given: Any) -> Any:
            num_tokens[0] = sum(len(context) for context, _ in contexts)
            return run(forward, slots, contexts, prefixes, **given)

        def repeated(tensor: Tensor, repeats: Any, **given: Any) -> Tensor:
            if isinstance(repeats, Tensor) and repeats.is_cuda:
                return tensor.new_empty(num_tokens[0])
            return repeat(tensor, repeats, **given)

        vars(decoding).update(prefill=prefill)
        Decoding._draw, plain = ended, Tensor  # type: ignore[method-assign]
        vars(torch).update(inference_mode=torch.no_grad)  # in it operators come undivided
        plain.repeat_interleave = repeated  # type: ignore[method-assign,assignment]
        vars(engine).update(checksum=lambda _: 0)
        storages: Any = UntypedStorage
        storages.data_ptr = lambda storage: storage._cdata
        super().build()


KINDS: dict[str, type[Cycle]] = {
    "planned": Cycle,
    "of a data set": OfflineCycle,
    "resumed": ResumedCycle,
    "with servers that get weights": PublishingCycle,
    "with an embedded engine": EmbeddedCycle,
    "with all columns": AgenticCycle,
}
